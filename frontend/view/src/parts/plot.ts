/** The options of uPlot: lines of several runs on one x axis, with bands, whiskers and marks. */

import uPlot from "uplot";
import { css } from "../colour";
import { number, tick } from "../format";
import { isSparse, MARKS, type Line } from "../series";
import type { Mark, Num } from "../types";

export interface Whisker {
  /** That of its line: several runs may have one colour. */
  label: string;
  x: number;
  mean: number;
  low: Num;
  high: Num;
  colour: string;
}

export interface Drawn {
  lines: Line[];
  whiskers: Whisker[];
  marks: (Mark & { x: number })[];
  log: boolean;
  zoom: [number, number] | null;
}

/** Resolves `var(--name)`: a canvas knows no CSS variables. */
export function resolve(colour: string): string {
  const name = /^var\((--[\w-]+)\)$/.exec(colour)?.[1];
  return name ? css(name) : colour;
}

function faint(colour: string, opacity: string): string {
  return /^#[0-9a-f]{6}$/i.test(colour) ? colour + opacity : colour;
}

function positive(values: Num[], log: boolean): Num[] {
  return log ? values.map((v) => (v !== null && v > 0 ? v : null)) : values;
}

/** The columns of one line: the mean last, since what is drawn last lies on top. */
function columns(line: Line): Num[][] {
  const extra = line.low && line.high ? [line.high, line.low] : line.raw ? [line.raw] : [];
  return [...extra, line.y];
}

export function table({ lines, whiskers, log }: Drawn): uPlot.AlignedData {
  const tables = lines.map((l) => [l.x, ...columns(l).map((c) => positive(c, log))] as uPlot.AlignedData);
  // Whiskers have a column of their own, so that the axes have room for them.
  if (whiskers.length) {
    const x = [...new Set(whiskers.map((w) => w.x))].sort((a, b) => a - b);
    const reach = (pick: (w: Whisker) => number, best: (...v: number[]) => number) =>
      x.map((each) => best(...whiskers.filter((w) => w.x === each).map(pick)));
    const low = positive(
      reach((w) => w.low ?? w.mean, Math.min),
      log,
    );
    const high = positive(
      reach((w) => w.high ?? w.mean, Math.max),
      log,
    );
    tables.push([x, low, high] as uPlot.AlignedData);
  }
  return tables.length === 1 ? (tables[0] as uPlot.AlignedData) : uPlot.join(tables.length ? tables : [[[]]]);
}

/** Whether a line has so few places that each is drawn as a point, too. */
export function hasFew(line: Line): boolean {
  return line.x.length < 40;
}

export function series({ lines, whiskers }: Drawn): { series: uPlot.Series[]; bands: uPlot.Band[]; main: number[] } {
  const all: uPlot.Series[] = [{}];
  const bands: uPlot.Band[] = [];
  const main: number[] = [];
  for (const line of lines) {
    const stroke = resolve(line.colour);
    const spanGaps = isSparse(line.y);
    const base: uPlot.Series = { spanGaps, points: { show: false } };
    if (line.low && line.high) {
      all.push({ ...base, stroke: faint(stroke, "00") }, { ...base, stroke: faint(stroke, "00") });
      bands.push({ series: [all.length - 2, all.length - 1], fill: faint(stroke, "33") });
    } else if (line.raw) all.push({ ...base, stroke: faint(stroke, "44"), width: 1 });
    const few = hasFew(line);
    all.push({ ...base, label: line.label, stroke, width: 2, points: { show: few, size: 5, stroke, fill: stroke } });
    main.push(all.length - 1);
  }
  if (whiskers.length)
    all.push({ paths: () => null, points: { show: false } }, { paths: () => null, points: { show: false } });
  return { series: all, bands, main };
}

const WHOLE = [1, 2, 5].flatMap((n) => [0, 1, 2, 3, 4, 5, 6].map((power) => n * 10 ** power)).sort((a, b) => a - b);

export function axes(whole: boolean, log: boolean): uPlot.Axis[] {
  const grid = { stroke: css("--grid"), width: 1 };
  const common: uPlot.Axis = {
    stroke: css("--muted"),
    grid,
    ticks: { show: false },
    font: "12px system-ui, sans-serif",
  };
  return [
    {
      ...common,
      ...(whole ? { incrs: WHOLE } : {}),
      size: 28,
      space: 60,
      values: (_u, values, _axis, _space, step) => values.map((v) => tick(v, step)),
    },
    {
      ...common,
      space: 34,
      // Places on a logarithmic axis are no step apart.
      values: (_u, values, _axis, _space, step) =>
        values.map((v) => (v === null ? "" : log ? number(v) : tick(v, step))),
      size: (u, values) => {
        if (!values?.length) return 40;
        u.ctx.save();
        u.ctx.font = "12px system-ui, sans-serif";
        const widest = Math.max(...values.map((v) => u.ctx.measureText(v).width));
        u.ctx.restore();
        return Math.ceil(widest) + 14;
      },
    },
  ];
}

/** Means with intervals, of the evaluations. */
export function drawWhiskers(u: uPlot, whiskers: readonly Whisker[]): void {
  const { ctx } = u;
  const ratio = devicePixelRatio;
  const cap = 4 * ratio;
  ctx.save();
  ctx.lineWidth = 1.5 * ratio;
  for (const w of whiskers) {
    const x = u.valToPos(w.x, "x", true);
    if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) continue;
    ctx.strokeStyle = ctx.fillStyle = resolve(w.colour);
    if (w.low !== null && w.high !== null) {
      const [low, high] = [u.valToPos(w.low, "y", true), u.valToPos(w.high, "y", true)];
      ctx.beginPath();
      ctx.moveTo(x, low);
      ctx.lineTo(x, high);
      for (const y of [low, high]) {
        ctx.moveTo(x - cap, y);
        ctx.lineTo(x + cap, y);
      }
      ctx.stroke();
    }
    ctx.beginPath();
    ctx.arc(x, u.valToPos(w.mean, "y", true), 3.5 * ratio, 0, 2 * Math.PI);
    ctx.fill();
  }
  ctx.restore();
}

/** Warnings as a triangle with a line, checkpoints as a tick, resumes and others as a diamond: at the top of the plot. */
export function drawMarks(u: uPlot, marks: Drawn["marks"]): void {
  const { ctx } = u;
  const ratio = devicePixelRatio;
  const { left, top, width, height } = u.bbox;
  const taken = new Set<string>();
  ctx.save();
  for (const mark of marks) {
    const x = Math.round(u.valToPos(mark.x, "x", true));
    const key = `${mark.kind} ${Math.round(x / (3 * ratio))}`;
    if (x < left - 1 || x > left + width + 1 || taken.has(key)) continue;
    taken.add(key);
    ctx.strokeStyle = ctx.fillStyle = css(MARKS[mark.kind].colour);
    ctx.lineWidth = ratio;
    if (mark.kind === "checkpoint") {
      ctx.fillRect(x - ratio / 2, top + height - 5 * ratio, ratio, 5 * ratio);
      continue;
    }
    ctx.globalAlpha = 0.5;
    ctx.setLineDash([3 * ratio, 3 * ratio]);
    ctx.beginPath();
    ctx.moveTo(x, top);
    ctx.lineTo(x, top + height);
    ctx.stroke();
    ctx.globalAlpha = 1;
    ctx.beginPath();
    const size = 4 * ratio;
    if (mark.kind === "warning" || mark.kind === "bad_step") {
      ctx.moveTo(x - size, top + 2 * size);
      ctx.lineTo(x + size, top + 2 * size);
      ctx.lineTo(x, top);
    } else {
      ctx.moveTo(x, top);
      ctx.lineTo(x + size, top + size);
      ctx.lineTo(x, top + 2 * size);
      ctx.lineTo(x - size, top + size);
    }
    ctx.fill();
  }
  ctx.restore();
}
