/** From one completion to others: samples of the group, groups of the step, other steps. */

import { useMemo } from "preact/hooks";
import { query, runPath } from "../api";
import { link, set, type Page } from "../context";
import { useApi, useKeys } from "../hooks";
import { nameOf, promptLink, RowScore } from "./answer";
import { rangeOf } from "./steps";
import type { Groups, Row, Run, Steps } from "../types";

/** The place of one completion: as in the address. */
export interface Place {
  step: number;
  eval: boolean;
  group: number;
  sample: number;
}

/** Changes where the table of a step does: when a resumed run takes it back, and when it is there again. */
export function tableOf(run: Run, steps: Steps, place: Place): string {
  const known: { step: number }[] = place.eval ? steps.evals : steps.steps;
  return `${run.read} ${known.some((s) => s.step === place.step)}`;
}

function goTo(page: Page, place: Place): void {
  set(page, { step: place.step, eval: place.eval ? 1 : null, group: place.group, sample: place.sample, token: null });
}

/** Where one can go from here: other samples of the group, other groups of the step, other steps. */
export function Navigation({
  page,
  run,
  steps,
  place,
  row,
}: {
  page: Page;
  run: Run;
  steps: Steps;
  place: Place;
  row: Row | undefined;
}) {
  // Groups are numbered from 0. Not by the prompt, whose completions may be more than the server gives at once.
  const where = { step: place.step, eval: place.eval ? 1 : 0, offset: place.group, limit: 1 };
  const { data } = useApi<Groups>(row ? query(runPath(run.id, "groups"), where) : null, tableOf(run, steps, place));
  const siblings = useMemo(() => {
    const rows = data?.groups.find((g) => g.group === place.group)?.rows ?? [];
    return [...rows].sort((a, b) => a.sample - b.sample);
  }, [data, place.group]);
  const known: { step: number; groups?: number }[] = place.eval ? steps.evals : steps.steps;
  const at = known.findIndex((s) => s.step === place.step);
  const groups = known[at]?.groups;
  const here = siblings.findIndex((r) => r.sample === place.sample);
  const sample = (by: number) => {
    const next = siblings[here + by];
    if (here >= 0 && next) goTo(page, { ...place, sample: next.sample });
  };
  const group = (by: number) => {
    const next = place.group + by;
    if (next >= 0 && (groups === undefined || next < groups)) goTo(page, { ...place, group: next, sample: 0 });
  };
  const step = (by: number) => {
    const next = known[at + by];
    if (at >= 0 && next) goTo(page, { ...place, step: next.step, group: 0, sample: 0 });
  };
  useKeys({
    ArrowLeft: () => sample(-1),
    ArrowRight: () => sample(1),
    "[": () => group(-1),
    "]": () => group(1),
    ",": () => step(-1),
    ".": () => step(1),
  });
  const range = rangeOf(steps.steps);
  return (
    <nav class="token-nav" aria-label="Completions">
      <Stepper title={place.eval ? "Held-out after step" : "Step"} value={place.step} keys=", ." onMove={step} />
      <Stepper title="Group" value={place.group} keys="[ ]" onMove={group} />
      <div class="siblings" role="group" aria-label="Samples of this group">
        <span class="muted">Samples</span>
        {siblings.map((r) => (
          <button
            key={r.sample}
            type="button"
            class="sibling"
            aria-current={r.sample === place.sample ? "true" : undefined}
            aria-label={nameOf(r)}
            title={`Sample ${r.sample} (← →)`}
            onClick={() => goTo(page, { ...place, sample: r.sample })}
          >
            <RowScore row={r} range={range} alone={`#${r.sample}`} />
          </button>
        ))}
      </div>
      <span class="token-links">
        <a href={link(page, "rollouts", { step: place.step, eval: place.eval ? 1 : null })}>All of this step</a>
        {row && <a href={promptLink(page, row)}>This prompt through time</a>}
      </span>
    </nav>
  );
}

function Stepper({
  title,
  value,
  keys,
  onMove,
}: {
  title: string;
  value: number;
  keys: string;
  onMove: (by: number) => void;
}) {
  return (
    <span class="stepper">
      <button
        type="button"
        class="icon"
        aria-label={`${title}: one back`}
        title={`Back (${keys[0]})`}
        onClick={() => onMove(-1)}
      >
        ◀
      </button>
      <span>
        {title} <b>{value}</b>
      </span>
      <button
        type="button"
        class="icon"
        aria-label={`${title}: one on`}
        title={`On (${keys[2]})`}
        onClick={() => onMove(1)}
      >
        ▶
      </button>
    </span>
  );
}
