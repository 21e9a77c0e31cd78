/** Held-out accuracy before and after, with 95 % intervals: one row per run. */

import { runPath } from "../api";
import type { Page } from "../context";
import { useApi } from "../hooks";
import { percent } from "../format";
import type { Accuracy, Run, Summary } from "../types";
import { interval } from "./basics";

const MANY = 6;

export function BeforeAfter({ page }: { page: Page }) {
  const bars = (
    <section class="before-after" aria-label="Held-out accuracy before and after">
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
  if (!data?.before && !data?.after) return null;
  const { before, after } = data;
  const words = `${run.name}: before ${interval(before)}, after ${interval(after)}`;
  return (
    <div class="ba-row">
      <span class="ba-name">
        <span class="swatch" style={{ background: colour }} /> {run.name}
      </span>
      <svg class="ba-plot" viewBox="0 0 400 26" preserveAspectRatio="none" role="img" aria-label={words}>
        {[0, 100, 200, 300, 400].map((x) => (
          <line key={x} class="ba-grid" x1={x} x2={x} y1="0" y2="26" />
        ))}
        {before && <Whisker value={before} y={8} class="ba-before" />}
        {after && <Whisker value={after} y={18} class="ba-after" colour={colour} />}
      </svg>
      <span class="ba-words">
        <span>
          <span class="muted">before</span> {interval(before)}
        </span>
        <span>
          <span class="muted">after</span> <b>{interval(after)}</b>
        </span>
        {before?.accuracy != null && after?.accuracy != null && (
          <span class="muted">
            {after.n ?? before.n} prompts, {change(after.accuracy - before.accuracy)}
          </span>
        )}
      </span>
    </div>
  );
}

function change(difference: number): string {
  return `${difference < 0 ? "-" : "+"}${percent(Math.abs(difference)).replace(" %", "")} points`;
}

function Whisker({ value, y, class: name, colour }: { value: Accuracy; y: number; class: string; colour?: string }) {
  if (value.accuracy === null) return null;
  const x = (v: number) => v * 400;
  return (
    <g class={name} style={colour ? { stroke: colour, fill: colour } : {}}>
      {value.low !== null && value.high !== null && <line x1={x(value.low)} x2={x(value.high)} y1={y} y2={y} />}
      <rect x={x(value.accuracy) - 2} width="4" y={y - 4} height="8" />
    </g>
  );
}
