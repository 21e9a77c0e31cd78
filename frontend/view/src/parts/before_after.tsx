/** What was held out before and after, with 95 % intervals: one row per run, of accuracy or of the loss. */

import { runPath } from "../api";
import type { Page } from "../context";
import { useApi } from "../hooks";
import { percent } from "../format";
import type { Num, Run, Summary } from "../types";
import { heldOut } from "./basics";

const MANY = 6;

export function BeforeAfter({ page }: { page: Page }) {
  const bars = (
    <section class="before-after" aria-label="Held-out before and after">
      {page.chosen.map((run) => (
        <Bar key={run.id} run={run} colour={page.colour(run.id)} />
      ))}
    </section>
  );
  if (page.chosen.length <= MANY) return bars;
  return (
    <details class="section">
      <summary>
        <h2>Before and after</h2> <span class="muted">{page.chosen.length} runs</span>
      </summary>
      {bars}
    </details>
  );
}

function Bar({ run, colour }: { run: Run; colour: string }) {
  const { data } = useApi<Summary>(runPath(run.id, "summary"), run.revision);
  // The data of a reward model are pairs of answers.
  const found = data && pairOf(data, run.kind === "reward" ? "pairs" : "prompts");
  if (!data || !found) return null;
  const { before, after, most } = found;
  const [was, is] = [heldOut(data, "before"), heldOut(data, "after")];
  return (
    <div class="ba-row">
      <span class="ba-name">
        <span class="swatch" style={{ background: colour }} /> {run.name}
      </span>
      <svg
        class="ba-plot"
        viewBox="0 0 400 26"
        preserveAspectRatio="none"
        role="img"
        aria-label={`${run.name}: before ${was}, after ${is}`}
      >
        {[0, 100, 200, 300, 400].map((x) => (
          <line key={x} class="ba-grid" x1={x} x2={x} y1="0" y2="26" />
        ))}
        {before && <Whisker value={before} most={most} y={8} class="ba-before" />}
        {after && <Whisker value={after} most={most} y={18} class="ba-after" colour={colour} />}
      </svg>
      <span class="ba-words">
        <span>
          <span class="muted">before</span> {was}
        </span>
        <span>
          <span class="muted">after</span> <b>{is}</b>
        </span>
        {found.words && <span class="muted">{found.words}</span>}
      </span>
    </div>
  );
}

interface Value {
  mean: Num;
  low: Num;
  high: Num;
}

interface Pair {
  before: Value | null;
  after: Value | null;
  /** The end of the axis, which begins at 0. */
  most: number;
  words: string;
}

function pairOf(data: Summary, what: string): Pair | null {
  if (data.loss_before || data.loss_after) return lossesOf(data);
  if (!data.before && !data.after) return null;
  const [before, after] = [data.before, data.after].map((each) => each && { ...each, mean: each.accuracy });
  if (!before || !after || before.mean === null || after.mean === null) {
    return { before: before ?? null, after: after ?? null, most: 1, words: "" };
  }
  const counted = counts(before.n, after.n, what);
  const moved = change(after.mean - before.mean);
  return { before, after, most: 1, words: counted ? `${counted}, ${moved}` : moved };
}

function lossesOf({ loss_before, loss_after }: Summary): Pair {
  const [before, after] = [loss_before, loss_after].map((each) => (each ? { ...each, mean: each.loss } : null));
  const ends = [before, after].map((v) => v?.high ?? v?.mean ?? 0);
  return {
    before: before ?? null,
    after: after ?? null,
    most: Math.max(...ends) || 1,
    words: counts(before?.n ?? null, after?.n ?? null, "rows"),
  };
}

/** How many were judged: both numbers where the evaluations left out different ones for want of a verdict. */
function counts(before: Num, after: Num, what: string): string {
  const known = new Set([before, after].filter((n) => n !== null));
  return known.size ? `${[...known].join(", then ")} ${what}` : "";
}

function change(difference: number): string {
  return `${difference < 0 ? "-" : "+"}${percent(Math.abs(difference)).replace(" %", "")} points`;
}

interface WhiskerProps {
  value: Value;
  most: number;
  y: number;
  class: string;
  colour?: string;
}

function Whisker({ value, most, y, class: name, colour }: WhiskerProps) {
  if (value.mean === null) return null;
  const x = (v: number) => (v / most) * 400;
  return (
    <g class={name} style={colour ? { stroke: colour, fill: colour } : {}}>
      {value.low !== null && value.high !== null && <line x1={x(value.low)} x2={x(value.high)} y1={y} y2={y} />}
      <rect x={x(value.mean) - 2} width="4" y={y - 4} height="8" />
    </g>
  );
}
