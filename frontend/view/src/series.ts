/** Numbers over steps: smoothing, several runs of one setting as one line, marks near a step. Pure functions. */

import type { Mark, Num } from "./types";

export interface Line {
  label: string;
  /** A CSS colour. */
  colour: string;
  x: number[];
  y: Num[];
  /** The step of each place on x, where that is a time. */
  steps?: number[];
  /** The values before smoothing, drawn faintly. */
  raw?: Num[];
  low?: Num[];
  high?: Num[];
}

/**
 * An exponential moving average without a bias to the first value: the weights of a value and of those before it always
 * sum to 1. Missing values stay missing and change nothing. `weight` 0 changes nothing at all.
 */
export function smooth(values: readonly Num[], weight: number): Num[] {
  let sum = 0;
  let mass = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return sum / mass;
  });
}

/**
 * Mean, smallest and largest over lines at every step at which all that go so far have a value. Over hours, a step is
 * where its runs reached it in the mean: no two reach it at the same time.
 */
export function meanAndRange(lines: readonly Line[]): { x: number[]; mean: Num[]; low: Num[]; high: Num[] } {
  const at = new Map<number, { x: number; y: number }[]>();
  for (const line of lines) {
    line.x.forEach((x, i) => {
      const y = line.y[i];
      if (y === null || y === undefined) return;
      const step = line.steps?.[i] ?? x;
      const known = at.get(step);
      if (known) known.push({ x, y });
      else at.set(step, [{ x, y }]);
    });
  }
  const steps = [...at.keys()].sort((a, b) => a - b);
  // A mean over fewer runs than before would jump where the shortest run ends: there the line ends too.
  const most = Math.max(0, ...[...at.values()].map((v) => v.length));
  const full = steps.flatMap((step) => {
    const found = at.get(step) ?? [];
    return found.length === most ? [found] : [];
  });
  const mean = (v: number[]) => v.reduce((a, b) => a + b, 0) / v.length;
  const pick = (f: (v: number[]) => number) => full.map((found) => f(found.map((each) => each.y)));
  return {
    x: full.map((found) => mean(found.map((each) => each.x))),
    mean: pick(mean),
    low: pick((v) => Math.min(...v)),
    high: pick((v) => Math.max(...v)),
  };
}

/** Hours of training at the end of each step, from the column of seconds; null where a run has none. */
export function hours(seconds: readonly Num[] | undefined): number[] | null {
  if (!seconds?.some((s) => s !== null)) return null;
  let sum = 0;
  return seconds.map((s) => (sum += (s ?? 0) / 3600));
}

/** A sparse column, such as one that is measured every tenth step, is joined over what is missing. */
export function isSparse(values: readonly Num[]): boolean {
  const known = values.filter((v) => v !== null && v !== undefined).length;
  return known > 0 && known < 0.7 * values.length;
}

export const MARKS: Record<Mark["kind"], { title: string; colour: string }> = {
  warning: { title: "warning", colour: "--bad" },
  bad_step: { title: "step not applied", colour: "--bad" },
  resumed: { title: "resumed", colour: "--accent" },
  checkpoint: { title: "checkpoint", colour: "--muted" },
  event: { title: "event", colour: "--muted" },
};
