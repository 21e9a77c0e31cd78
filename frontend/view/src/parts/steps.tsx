/** The slider over steps, with the histogram of rewards of every step behind it and of the chosen step beside it. */

import { useEffect, useRef } from "preact/hooks";
import { css } from "../colour";
import { number, plural } from "../format";
import { useKeys, useScheme, useWidth } from "../hooks";
import type { Run, StepInfo } from "../types";

interface StepsProps {
  steps: StepInfo[];
  step: number;
  given: Run["given"];
  onStep: (step: number | null) => void;
}

const HEIGHT = 72;

export function StepSlider({ steps, step, given, onStep }: StepsProps) {
  const at = Math.max(
    0,
    steps.findIndex((s) => s.step === step),
  );
  const last = steps.length - 1;
  const to = (index: number) => {
    const found = steps[Math.max(0, Math.min(last, index))];
    if (found && found.step !== step) onStep(found.step);
  };
  useKeys({ ArrowLeft: () => to(at - 1), ArrowRight: () => to(at + 1), Home: () => to(0), End: () => to(last) });
  const info = steps[at];
  if (!info) return null;
  return (
    <div class="steps">
      <div class="steps-map">
        {!given && steps.some((s) => s.histogram) && <HeatMap steps={steps} at={at} onPick={to} />}
        <div class="steps-slider">
          <button
            type="button"
            class="icon"
            aria-label="Step before"
            title="Step before (←)"
            disabled={at === 0}
            onClick={() => to(at - 1)}
          >
            ◀
          </button>
          <input
            type="range"
            aria-label="Step"
            aria-valuetext={`step ${info.step} of ${steps[last]?.step}`}
            min="0"
            max={String(last)}
            value={String(at)}
            onInput={(e) => to(Number(e.currentTarget.value))}
          />
          <button
            type="button"
            class="icon"
            aria-label="Next step"
            title="Next step (→)"
            disabled={at === last}
            onClick={() => to(at + 1)}
          >
            ▶
          </button>
          <button type="button" title="Follow the newest step" onClick={() => onStep(null)}>
            Latest
          </button>
        </div>
      </div>
      {given ? <Given info={info} given={given} /> : <Histogram info={info} />}
    </div>
  );
}

/** Every step as a column, every bin of the reward as a row; the opacity is the share of the step's completions. */
function HeatMap({ steps, at, onPick }: { steps: StepInfo[]; at: number; onPick: (index: number) => void }) {
  const [box, width] = useWidth<HTMLDivElement>();
  const canvas = useRef<HTMLCanvasElement>(null);
  const scheme = useScheme();
  useEffect(() => {
    const context = canvas.current?.getContext("2d");
    if (!canvas.current || !context || width < 10) return;
    const ratio = devicePixelRatio;
    canvas.current.width = width * ratio;
    canvas.current.height = HEIGHT * ratio;
    context.scale(ratio, ratio);
    draw(context, steps, at, width);
  }, [steps, at, width, scheme]);
  const pick = (event: MouseEvent) => {
    const left = canvas.current?.getBoundingClientRect().left ?? 0;
    onPick(Math.floor(((event.clientX - left) / width) * steps.length));
  };
  return (
    <div ref={box} class="heatmap" style={{ height: `${HEIGHT}px` }}>
      <canvas
        ref={canvas}
        role="img"
        aria-label={`Rewards of ${plural(steps.length, "step")}: mean from ${number(steps[0]?.mean)} to ${number(steps.at(-1)?.mean)}`}
        title="Rewards of every step; click to choose one"
        onClick={pick}
        onPointerMove={(e) => e.buttons === 1 && pick(e)}
      />
    </div>
  );
}

function draw(context: CanvasRenderingContext2D, steps: StepInfo[], at: number, width: number): void {
  context.clearRect(0, 0, width, HEIGHT);
  const column = width / steps.length;
  // Not every step has a pixel of its own in a long run.
  const stride = Math.max(1, Math.floor(steps.length / width));
  for (let i = 0; i < steps.length; i += stride) {
    const histogram = steps[i]?.histogram;
    if (!histogram) continue;
    const most = histogram.counts.reduce((a, b) => a + b, 0);
    const row = HEIGHT / histogram.counts.length;
    histogram.counts.forEach((count, bin) => {
      if (!count) return;
      context.fillStyle = `rgb(${css("--blue").split(" ").join(",")},${(0.12 + 0.88 * Math.sqrt(count / most)).toFixed(3)})`;
      context.fillRect(
        i * column,
        HEIGHT - (bin + 1) * row,
        Math.max(1, column * stride - (column > 6 ? 1 : 0)),
        row - (row > 4 ? 1 : 0),
      );
    });
  }
  meanLine(context, steps, column);
  context.strokeStyle = css("--accent");
  context.lineWidth = 2;
  const left = Math.max(1, Math.min(width - 3, at * column));
  context.strokeRect(left, 1, Math.max(2, column - 1), HEIGHT - 2);
}

/** The mean reward of every step, on the scale of the histograms. */
function meanLine(context: CanvasRenderingContext2D, steps: StepInfo[], column: number): void {
  const range = rangeOf(steps);
  if (!range) return;
  const [low, high] = range;
  context.beginPath();
  steps.forEach((s, i) => {
    if (s.mean === null) return;
    context.lineTo((i + 0.5) * column, HEIGHT - 2 - ((s.mean - low) / (high - low)) * (HEIGHT - 4));
  });
  context.strokeStyle = css("--text");
  context.lineWidth = 1.5;
  context.stroke();
}

/** A step of rows from the data, which have no rewards. */
function Given({ info, given }: { info: StepInfo; given: Run["given"] }) {
  return (
    <p class="histogram">
      <b>Step {info.step}</b> · {plural(info.groups, given === "pairs" ? "preference pair" : "demonstration")}
    </p>
  );
}

function Histogram({ info }: { info: StepInfo }) {
  const { histogram } = info;
  const most = Math.max(1, ...(histogram?.counts ?? []));
  const words = `Step ${info.step}: ${plural(info.rows, "completion")}, mean reward ${number(info.mean)}`;
  return (
    <div class="histogram">
      <p>
        <b>Step {info.step}</b> · {plural(info.rows, "completion")} in {plural(info.groups, "group")} · mean reward{" "}
        <b>{number(info.mean)}</b>
      </p>
      {histogram && (
        <>
          <div class="bars" role="img" aria-label={words}>
            {histogram.counts.map((count, i) => (
              <div
                key={i}
                class="bar-slot"
                title={`${number(histogram.edges[i])} to ${number(histogram.edges[i + 1])}: ${plural(count, "completion")}`}
              >
                <div class="bar" style={{ height: `${count ? Math.max(3, (100 * count) / most) : 0}%` }} />
              </div>
            ))}
          </div>
          <div class="bar-ends">
            <span>{number(histogram.edges[0])}</span>
            <span>reward</span>
            <span>{number(histogram.edges.at(-1))}</span>
          </div>
        </>
      )}
    </div>
  );
}

/** The ends of the run's rewards: what the colours of scores mean is the same in every step. */
export function rangeOf(steps: StepInfo[]): [number, number] | undefined {
  const edges = steps.find((s) => s.histogram)?.histogram?.edges;
  const [low, high] = [edges?.[0], edges?.at(-1)];
  return low !== undefined && high !== undefined && high > low ? [low, high] : undefined;
}
