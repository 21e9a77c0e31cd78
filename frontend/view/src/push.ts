/** What the objective did with each token: its gradient is -Σ C_t ∇ log π_t, so the sign of C_t says it all. */

import type { Completion, Num } from "./types";

export const PUSHES = ["up", "down", "held", "none", "unused", "given"] as const;
export type Push = (typeof PUSHES)[number];

export const PUSH_TITLES: Record<Push, { title: string; help: string }> = {
  up: { title: "pushed up", help: "The step made this token more likely: its coefficient is above 0" },
  down: { title: "pushed down", help: "The step made this token less likely: its coefficient is below 0" },
  held: {
    title: "held",
    help: "Nothing of its advantage passed: the trust region's weight, or a correction, is 0. A KL term may still move it a little",
  },
  none: {
    title: "no signal",
    help: "Its advantage is 0: the group's rewards were equal, or the completion was average",
  },
  unused: { title: "not trained on", help: "No advantage or coefficient was recorded for it" },
  given: { title: "not sampled", help: "Text of the environment or a tool: the model read it and did not write it" },
};

/**
 * One entry per token. A token is held where it has an advantage of which nothing passed: its weight is 0, even if a KL
 * term still moves it a little. Without coefficients the sign of the advantage stands in.
 */
export function pushes(completion: Completion): Push[] {
  const { coefficient, advantage, weight } = completion.values;
  const push = coefficient ?? advantage;
  return completion.tokens.map((token, i) =>
    token.sampled ? pushOf(advantage?.[i] ?? 0, push?.[i] ?? null, weight?.[i] === 0) : "given",
  );
}

function pushOf(advantage: number, push: Num, shut: boolean): Push {
  if (advantage !== 0 && (shut || push === 0)) return "held";
  if (push === null) return "unused";
  return push > 0 ? "up" : push < 0 ? "down" : "none";
}

export interface Tally {
  push: Push;
  count: number;
  /** The share of Σ|C| that these tokens have; null without coefficients. */
  share: Num;
}

export function tally(completion: Completion, of: readonly Push[]): Tally[] {
  const coefficient = completion.values["coefficient"];
  const size = (i: number) => Math.abs(coefficient?.[i] ?? 0);
  const total = of.reduce((sum, _p, i) => sum + size(i), 0);
  return PUSHES.map((push) => {
    const count = of.filter((p) => p === push).length;
    const mass = of.reduce((sum, p, i) => (p === push ? sum + size(i) : sum), 0);
    return { push, count, share: coefficient && total > 0 ? mass / total : null };
  }).filter((t) => t.count);
}

const ORDER = [
  "coefficient",
  "advantage",
  "ratio",
  "weight",
  "entropy",
  "logprob",
  "sampling_logprob",
  "sampler_gap",
  "ref_gap",
  "ref_logprob",
];

/** The values that this completion has, in the order in which they are offered. */
export function valueNames(completion: Completion): string[] {
  const names = Object.keys(completion.values).filter((name) => completion.values[name]?.some((v) => v !== null));
  return names.sort((a, b) => place(a) - place(b));
}

function place(name: string): number {
  const at = ORDER.indexOf(name);
  return at < 0 ? ORDER.length : at;
}

/** What is shown first: the push itself, or else the first value that is not the same for every token. */
export function firstValue(completion: Completion, names: readonly string[]): string | undefined {
  if (names.includes("coefficient")) return "coefficient";
  const varies = (name: string) => new Set(completion.values[name]?.filter((v) => v !== null)).size > 1;
  return names.find(varies) ?? names[0];
}

export interface Spread {
  n: number;
  min: number;
  median: number;
  mean: number;
  max: number;
}

export function spread(values: readonly Num[]): Spread | null {
  const known = values.filter((v): v is number => v !== null).sort((a, b) => a - b);
  const n = known.length;
  const [min, max] = [known[0], known.at(-1)];
  if (min === undefined || max === undefined) return null;
  const middle = ((known[(n - 1) >> 1] ?? 0) + (known[n >> 1] ?? 0)) / 2;
  return { n, min, median: middle, mean: known.reduce((a, b) => a + b, 0) / n, max };
}

export interface Bin {
  low: number;
  high: number;
  count: number;
}

export function histogram(values: readonly Num[], bins: number): Bin[] {
  const found = spread(values);
  if (!found) return [];
  const { min, max } = found;
  if (min === max) return [{ low: min, high: max, count: found.n }];
  const width = (max - min) / bins;
  const all = Array.from({ length: bins }, (_, i) => ({ low: min + i * width, high: min + (i + 1) * width, count: 0 }));
  for (const value of values) {
    if (value === null) continue;
    const bin = all[Math.min(bins - 1, Math.floor((value - min) / width))];
    if (bin) bin.count += 1;
  }
  return all;
}

/** The tokens with the largest and the smallest values, away from `centre`. */
export function strongest(values: readonly Num[], centre: number, most: number): { high: number[]; low: number[] } {
  const known = values.flatMap((v, i) => (v === null ? [] : [[v - centre, i] as const]));
  const pick = (sign: 1 | -1) =>
    known
      .filter(([v]) => v * sign > 0)
      .sort((a, b) => sign * (b[0] - a[0]))
      .slice(0, most)
      .map(([, i]) => i);
  return { high: pick(1), low: pick(-1) };
}
