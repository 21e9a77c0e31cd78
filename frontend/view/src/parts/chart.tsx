/** One chart over steps: values under a cursor that all charts share, marks with their text, zoom by dragging. */

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { number } from "../format";
import { useScheme, useWidth } from "../hooks";
import { isSparse, MARKS } from "../series";
import { axes, drawMarks, drawWhiskers, hasFew, series, table, type Drawn } from "./plot";
import { Text } from "./text";

/** Lines whose values are under the cursor: more would be higher than the screen. */
const SHOWN = 12;

interface Hover {
  x: number;
  left: number;
  values: { label: string; colour: string; text: string }[];
  marks: Drawn["marks"];
}

interface ChartProps extends Drawn {
  title: string;
  height: number;
  xTitle: string;
  onZoom: (range: [number, number] | null) => void;
}

export function Chart(props: ChartProps) {
  const { title, height, lines, whiskers, marks, log, zoom } = props;
  const [box, width] = useWidth<HTMLDivElement>();
  const scheme = useScheme();
  const plot = useRef<uPlot | null>(null);
  const current = useRef(props);
  current.current = props;
  const [hover, setHover] = useState<Hover | null>(null);
  // What `series` makes of the lines; a run that trains may change it with every step.
  const form = (l: Drawn["lines"][number]) => [l.label, l.colour, !!l.raw, !!l.low, isSparse(l.y), hasFew(l)].join();
  const shape = [lines.map(form).join("|"), whiskers.length > 0].join();
  const data = useMemo(() => table({ lines, whiskers, marks, log, zoom }), [lines, whiskers, marks, log, zoom]);

  useEffect(() => {
    if (!box.current || width < 50) return;
    const made = new uPlot(options(width, height, current, setHover), table(current.current), box.current);
    plot.current = made;
    return () => {
      made.destroy();
      plot.current = null;
    };
  }, [box, width, height, shape, log, scheme, props.xTitle]);

  useEffect(() => {
    plot.current?.setData(data);
  }, [data]);

  const move = (event: KeyboardEvent) => {
    const u = plot.current;
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!u || !by) return;
    event.preventDefault();
    event.stopPropagation();
    const last = u.data[0].length - 1;
    const at = Math.max(0, Math.min(last, (u.cursor.idx ?? (by > 0 ? -1 : last + 1)) + by));
    u.setCursor({ left: u.valToPos(u.data[0][at] ?? 0, "x"), top: u.over.clientHeight / 2 });
    setHover(under(u, current.current));
  };

  return (
    <div class="chart" onPointerLeave={() => setHover(null)}>
      <div
        ref={box}
        class="plot"
        role="img"
        aria-label={describe(title, props)}
        tabIndex={0}
        onKeyDown={move}
        onBlur={() => setHover(null)}
        style={{ height: `${height}px` }}
      />
      {hover && <Tip hover={hover} xTitle={props.xTitle} width={width} />}
    </div>
  );
}

function options(
  width: number,
  height: number,
  current: { current: ChartProps },
  setHover: (hover: Hover | null) => void,
): uPlot.Options {
  const { series: all, bands } = series(current.current);
  const xRange: uPlot.Range.Function = (_u, min, max) => {
    const zoom = current.current.zoom;
    if (zoom) return zoom;
    return min === max ? [min - 0.5, max + 0.5] : [min, max];
  };
  return {
    width,
    height,
    padding: [10, 10, 0, 0],
    legend: { show: false },
    series: all,
    bands,
    axes: axes(current.current.xTitle === "step", current.current.log),
    scales: { x: { time: false, range: xRange }, y: current.current.log ? { distr: 3 } : { range: yRange } },
    cursor: {
      sync: { key: "steps", scales: ["x", null] },
      drag: { x: true, y: false, setScale: false },
      points: { show: (u, i) => uPlotPoint(u, i) },
      bind: { dblclick: () => () => (current.current.onZoom(null), null) },
    },
    hooks: {
      draw: [(u) => drawWhiskers(u, current.current.whiskers), (u) => drawMarks(u, current.current.marks)],
      setCursor: [
        (u) =>
          setHover(u.cursor.event?.type === "mousemove" && u.over.matches(":hover") ? under(u, current.current) : null),
      ],
      setSelect: [
        (u) => {
          const { left, width: selected } = u.select;
          if (selected > 4 && u.over.matches(":hover")) {
            current.current.onZoom([u.posToVal(left, "x"), u.posToVal(left + selected, "x")]);
          }
          if (selected > 0) u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        },
      ],
    },
  };
}

/** A line that is flat gets an axis around its value, and not one that ends far away from it. */
function yRange(_u: uPlot, low: number | null, high: number | null): uPlot.Range.MinMax {
  if (low === null || high === null) return [0, 1];
  if (low !== high) return uPlot.rangeNum(low, high, 0.1, true);
  return low === 0 ? [0, 1] : [low - Math.abs(low) / 5, low + Math.abs(low) / 5];
}

/** The point on a line under the cursor; columns that only make room for whiskers have none. */
function uPlotPoint(u: uPlot, i: number): HTMLElement {
  const point = document.createElement("div");
  point.className = "u-cursor-pt";
  const stroke = u.series[i]?.label ? u.series[i]?.stroke : undefined;
  const colour = typeof stroke === "function" ? String(stroke(u, i)) : "transparent";
  point.style.width = point.style.height = "7px";
  point.style.background = colour;
  return point;
}

/** What is under the cursor: each line's value at or before it, and the marks near it. */
function under(u: uPlot, { lines, marks, whiskers }: ChartProps): Hover | null {
  const { idx, left } = u.cursor;
  if (idx === null || idx === undefined || left === undefined || left < 0) return null;
  const x = u.data[0][idx];
  if (x === undefined) return null;
  const values = lines.map((line) => {
    const at = nearest(line.x, x);
    const range = line.low && line.high ? ` (${number(line.low[at])} to ${number(line.high[at])})` : "";
    const raw = line.raw ? ` (raw ${number(line.raw[at])})` : "";
    return { label: line.label, colour: line.colour, text: line.x[at] === x ? number(line.y[at]) + range + raw : "–" };
  });
  for (const w of whiskers.filter((each) => each.x === x && each.low !== null)) {
    const known = values.find((v) => v.label === w.label);
    if (known) known.text += ` (95 %: ${number(w.low)} to ${number(w.high)})`;
  }
  const near = marks.filter((mark) => Math.abs(u.valToPos(mark.x, "x") - left) < 7).slice(0, 6);
  return { x, left, values, marks: near };
}

function nearest(xs: readonly number[], x: number): number {
  let low = 0;
  let high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((xs[middle] ?? 0) < x) low = middle + 1;
    else high = middle;
  }
  return low;
}

function Tip({ hover, xTitle, width }: { hover: Hover; xTitle: string; width: number }) {
  const onRight = hover.left < width / 2;
  const style = onRight ? { left: `${hover.left + 60}px` } : { right: `${Math.max(0, width - hover.left - 30)}px` };
  return (
    <div class="tip" role="status" style={style}>
      <div class="muted">
        {xTitle} {number(hover.x)}
      </div>
      {hover.values.slice(0, SHOWN).map((v) => (
        <div class="tip-row" key={v.label}>
          <span class="swatch" style={{ background: v.colour }} />
          <span class="tip-name">{v.label}</span>
          <b>{v.text}</b>
        </div>
      ))}
      {hover.values.length > SHOWN && <div class="muted">and {hover.values.length - SHOWN} more</div>}
      {hover.marks.map((m, i) => (
        <div class={`tip-mark ${m.kind}`} key={i}>
          <b>
            {MARKS[m.kind].title} at step {m.step}
          </b>{" "}
          <Text text={m.text} />
        </div>
      ))}
    </div>
  );
}

/** What a reader who cannot see the chart is told. */
function describe(title: string, { lines, whiskers, marks, xTitle }: ChartProps): string {
  const parts = lines.map((line) => {
    const known = line.y.filter((v): v is number => v !== null && v !== undefined);
    if (!known.length) return `${line.label}: no values`;
    let low = Infinity;
    let high = -Infinity;
    for (const v of known) {
      low = Math.min(low, v);
      high = Math.max(high, v);
    }
    return `${line.label}: first ${number(known[0])}, last ${number(known.at(-1))}, smallest ${number(low)}, largest ${number(high)}`;
  });
  const warned = marks.filter((m) => m.kind === "warning").length;
  return `${title} over ${xTitle}. ${parts.join(". ")}.${whiskers.some((w) => w.low !== null) ? " With 95 % intervals." : ""}${warned ? ` ${warned} warnings.` : ""} Arrow keys move the cursor.`;
}
