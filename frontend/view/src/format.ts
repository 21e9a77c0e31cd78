import type { Num } from "./types";

/** Four significant digits at most; a missing number is a dash. */
export function number(value: Num | undefined): string {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return value.toLocaleString("en-US");
  if (size >= 1e5 || size < 1e-3)
    return value
      .toExponential(2)
      .replace("e+", "e")
      .replace(/\.?0+e/, "e");
  return String(Number(value.toPrecision(4)));
}

/** A place on an axis whose places are `step` apart: with more digits than `number` where two would look the same. */
export function tick(value: number, step: number): string {
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return number(value);
  const digits = Math.floor(Math.log10(size)) - Math.floor(Math.log10(step)) + 1;
  if (digits <= (size >= 1e5 || size < 1e-3 ? 3 : 4) || digits > 15) return number(value);
  return size < 1e-3 ? value.toExponential(digits - 1) : String(Number(value.toPrecision(digits)));
}

/**
 * Two significant digits, for the ends of a small axis; more where rounding would move the value by a tenth of `apart`,
 * its distance to what is written beside it: a ratio of 1.02 beside 1 is not 1.
 */
export function short(value: number, apart = Infinity): string {
  let digits = 2;
  while (apart && digits < 6 && Math.abs(Number(value.toPrecision(digits)) - value) > apart / 10) digits += 1;
  const near = Number(value.toPrecision(digits));
  return digits > 4 ? String(near) : number(near);
}

export function signed(value: Num | undefined): string {
  return value !== null && value !== undefined && value > 0 ? `+${number(value)}` : number(value);
}

export function percent(value: Num | undefined): string {
  if (value === null || value === undefined) return "–";
  const hundred = value * 100;
  // 399 of 400 are not all of them.
  if (hundred > 99 && hundred < 100) return `${(Math.floor(hundred * 10) / 10).toFixed(1)} %`;
  return `${hundred > 0 && hundred < 1 ? hundred.toFixed(1) : Math.round(hundred)} %`;
}

export function bytes(value: Num | undefined): string {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  let left = value;
  while (left >= 1024 && at < units.length - 1) {
    left /= 1024;
    at += 1;
  }
  return `${left >= 100 || at === 0 ? Math.round(left) : left.toFixed(1)} ${units[at]}`;
}

export function seconds(value: number): string {
  const whole = Math.round(value); // before it is split: 119.7 s are 2 min 0 s
  if (whole < 90) return `${whole} s`;
  if (whole < 600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (value < 90 * 60) return `${Math.round(value / 60)} min`;
  if (value < 48 * 3600) return `${(value / 3600).toFixed(1)} h`;
  return `${(value / 86400).toFixed(1)} days`;
}

export function ago(unix: number): string {
  const passed = Date.now() / 1000 - unix;
  return passed < 5 ? "now" : `${seconds(passed)} ago`;
}

/** Any value of a configuration or a data row as one line; numbers with all their digits, by which settings differ. */
export function plain(value: unknown): string {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value;
  if (typeof value === "number") return value !== 0 && Math.abs(value) < 1e-4 ? value.toExponential() : String(value);
  return JSON.stringify(value);
}

export function plural(count: number, noun: string, many = `${noun}s`): string {
  return `${count.toLocaleString("en-US")} ${count === 1 ? noun : many}`;
}
