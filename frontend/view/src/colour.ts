/**
 * Colours of values. Blue and orange are told apart with every common kind of colour blindness; the strength is the
 * opacity, so that text keeps its contrast in the light and in the dark. Held tokens also get a pattern, see style.css.
 */

import type { About, Num } from "./types";

export interface Scale {
  kind: "diverging" | "sequential";
  centre: number;
  /** Distance from the centre at which the colour is full. */
  reach: number;
  log: boolean;
}

/** Where a value lies, from -1 (full orange) over 0 (no colour) to 1 (full blue). */
export function place(value: number, scale: Scale): number {
  const distance = scale.log ? Math.log(Math.max(value, 1e-12) / scale.centre) : value - scale.centre;
  return scale.reach ? Math.max(-1, Math.min(1, distance / scale.reach)) : 0;
}

export function background(value: Num | undefined, scale: Scale): string {
  if (value === null || value === undefined) return "";
  const at = place(value, scale);
  if (scale.kind === "sequential") return tint("violet", Math.max(0, at));
  // A root brings out small values: in most completions nearly all are far from the largest.
  return tint(at < 0 ? "orange" : "blue", Math.sqrt(Math.abs(at)));
}

/** A colour of a strength from 0 to 1; 1 is as strong as text on it can still be read, in the light and in the dark. */
export function tint(name: "orange" | "blue" | "violet", strength: number): string {
  return `rgb(var(--${name}) / calc(${strength.toFixed(3)} * var(--strongest)))`;
}

/** The scale of a completion's values: full colour at the 99 % quantile, so that one outlier does not pale the rest. */
export function scaleOf(name: string, about: Pick<About, "diverging" | "middle">, values: readonly Num[]): Scale {
  const known = values.filter((v): v is number => v !== null);
  const centre = about.middle ?? (name === "ratio" ? 1 : 0);
  // A ratio of 2 is as far from 1 as a ratio of 1/2.
  const log = about.diverging && centre > 0;
  const distances = known.map((v) => (log ? Math.log(Math.max(v, 1e-12) / centre) : v - centre));
  if (about.diverging) return { kind: "diverging", centre, log, reach: reach(distances.map(Math.abs)) };
  // Log-probs are at most 0: what is surprising gets the colour.
  if (name.includes("logprob")) return { kind: "sequential", centre: 0, log, reach: -reach(known.map((v) => -v)) };
  return { kind: "sequential", centre: 0, log, reach: reach(known) };
}

function reach(sizes: number[]): number {
  if (sizes.length === 0) return 0;
  const sorted = [...sizes].sort((a, b) => a - b);
  return sorted[Math.ceil(0.99 * (sorted.length - 1))] || (sorted.at(-1) ?? 0);
}

/** Colours of runs (after Okabe and Ito), by place in the list of all runs. */
export function runColour(place: number): string {
  return `var(--run-${place % 8})`;
}

/** A colour of the style sheet, for a canvas. */
export function css(variable: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(variable).trim();
}
