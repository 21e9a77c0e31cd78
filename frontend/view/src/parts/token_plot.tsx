/** The chosen value over the tokens of a completion, and its histogram. */

import { useEffect, useRef } from "preact/hooks";
import { css, place, type Scale } from "../colour";
import { number, plural, short } from "../format";
import { useScheme, useWidth } from "../hooks";
import { histogram, spread } from "../push";
import type { Completion, Num } from "../types";

const HEIGHT = 96;
const LEFT = 52;

interface PlotProps {
  completion: Completion;
  title: string;
  values: readonly Num[];
  scale: Scale;
  at: number | null;
  onHover: (index: number | null) => void;
  onPick: (index: number) => void;
}

export function TokenPlot({ completion, title, values, scale, at, onHover, onPick }: PlotProps) {
  const [box, width] = useWidth<HTMLDivElement>();
  const canvas = useRef<HTMLCanvasElement>(null);
  const scheme = useScheme();
  useEffect(() => {
    const context = canvas.current?.getContext("2d");
    if (!canvas.current || !context || width < 80) return;
    const ratio = devicePixelRatio;
    canvas.current.width = width * ratio;
    canvas.current.height = HEIGHT * ratio;
    context.scale(ratio, ratio);
    draw(context, { completion, values, scale, at, width });
  }, [completion, values, scale, at, width, scheme]);
  const index = (event: MouseEvent): number => {
    const left = canvas.current?.getBoundingClientRect().left ?? 0;
    const share = (event.clientX - left - LEFT) / (width - LEFT);
    return Math.max(0, Math.min(values.length - 1, Math.floor(share * values.length)));
  };
  const found = spread(values);
  return (
    <div ref={box} class="token-plot" style={{ height: `${HEIGHT}px` }}>
      <canvas
        ref={canvas}
        role="img"
        aria-label={`${title} over ${plural(values.length, "token")}: smallest ${number(found?.min)}, median ${number(found?.median)}, largest ${number(found?.max)}`}
        onPointerMove={(e) => onHover(index(e))}
        onPointerLeave={() => onHover(null)}
        onClick={(e) => onPick(index(e))}
      />
    </div>
  );
}

interface Drawing {
  completion: Completion;
  values: readonly Num[];
  scale: Scale;
  at: number | null;
  width: number;
}

/** The values' range with the centre in it, a little wider than the values. */
function range(values: readonly Num[], scale: Scale): [number, number] {
  const found = spread(values);
  const low = Math.min(scale.centre, found?.min ?? 0);
  const high = Math.max(scale.centre, found?.max ?? 0);
  return low === high ? [low - 1, high + 1] : [low, high];
}

function colourOf(value: number, scale: Scale): string {
  if (scale.kind === "sequential") return rgb("--violet", 0.9);
  return rgb(place(value, scale) < 0 ? "--orange" : "--blue", 0.9);
}

function rgb(variable: string, opacity: number): string {
  return `rgba(${css(variable).split(/\s+/).join(",")},${opacity})`;
}

function draw(context: CanvasRenderingContext2D, { completion, values, scale, at, width }: Drawing): void {
  const n = values.length;
  const [low, high] = range(values, scale);
  const y = (v: number) => HEIGHT - 6 - ((v - low) / (high - low)) * (HEIGHT - 14);
  const x = (i: number) => LEFT + (i / n) * (width - LEFT);
  const bar = (width - LEFT) / n;
  context.clearRect(0, 0, width, HEIGHT);
  context.fillStyle = css("--grid");
  completion.tokens.forEach((token, i) => {
    if (!token.sampled) context.fillRect(x(i), 0, Math.max(0.5, bar), HEIGHT);
  });
  const colours = new Map<string, string>();
  for (let i = 0; i < n; i += 1) {
    const value = values[i];
    if (value === null || value === undefined) continue;
    const side = value < scale.centre ? "low" : "high";
    const colour = colours.get(side) ?? colourOf(value, scale);
    colours.set(side, colour);
    context.fillStyle = colour;
    const [from, to] = [y(scale.centre), y(value)];
    context.fillRect(
      x(i),
      Math.min(from, to),
      Math.max(1, bar - (bar > 4 ? 1 : 0)),
      Math.max(1.5, Math.abs(to - from)),
    );
  }
  context.fillStyle = css("--muted");
  context.fillRect(LEFT, y(scale.centre), width - LEFT, 1);
  boundaries(context, completion, x);
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "right";
  context.fillStyle = css("--muted");
  const ticks = [low, scale.centre, high].filter((v, i, all) => all.findIndex((o) => Math.abs(y(o) - y(v)) < 12) === i);
  for (const tick of ticks) {
    const text = short(tick, Math.abs(tick - scale.centre));
    context.fillText(text, LEFT - 6, Math.min(HEIGHT - 2, Math.max(10, y(tick) + 4)));
  }
  if (at !== null) {
    context.fillStyle = css("--text");
    context.fillRect(x(at) + Math.min(bar, 6) / 2 - 0.75, 0, 1.5, HEIGHT);
  }
}

/** Where turns begin, and where the weights that sampled changed. */
function boundaries(context: CanvasRenderingContext2D, completion: Completion, x: (i: number) => number): void {
  context.fillStyle = css("--muted");
  for (const turn of completion.turns ?? []) if (turn.start > 0) context.fillRect(x(turn.start), 0, 1, HEIGHT);
  const versions = (completion.versions ?? []).filter((v, i, all) => v.version !== all[i - 1]?.version);
  if (versions.length < 2) return;
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "left";
  for (const v of versions) {
    context.fillRect(x(v.start), 0, 1, HEIGHT);
    context.fillText(`v${v.version}`, x(v.start) + 3, 10);
  }
}

const BINS = 25;

export function TokenHistogram({ title, values, scale }: { title: string; values: readonly Num[]; scale: Scale }) {
  const bins = histogram(values, BINS);
  const found = spread(values);
  if (!found || bins.length < 2) return null;
  const most = Math.max(...bins.map((b) => b.count));
  return (
    <div class="token-histogram">
      <div class="bars" role="img" aria-label={`Histogram of ${title} over ${plural(found.n, "token")}`}>
        {bins.map((bin, i) => {
          const middle = (bin.low + bin.high) / 2;
          const name = scale.kind === "sequential" ? "--violet" : middle < scale.centre ? "--orange" : "--blue";
          // A root, so that bins of a few tokens next to one of hundreds can be seen.
          const share = bin.count ? Math.max(4, 100 * Math.sqrt(bin.count / most)) : 0;
          return (
            <div
              key={i}
              class="bar-slot"
              title={`${number(bin.low)} to ${number(bin.high)}: ${plural(bin.count, "token")}`}
            >
              <div class="bar" style={{ height: `${share}%`, background: `rgb(var(${name}) / 0.8)` }} />
            </div>
          );
        })}
      </div>
      <div class="bar-ends">
        <span>{short(found.min, found.max - found.min)}</span>
        <span title="Heights are square roots of counts">median {short(found.median, found.max - found.min)}</span>
        <span>{short(found.max, found.max - found.min)}</span>
      </div>
    </div>
  );
}
