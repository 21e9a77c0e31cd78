/** What a chart draws of runs: lines of a metric or of evaluations, whiskers, marks. */

import { evaluations, placeOf, places, type Measured, type Pair } from "./metrics";
import type { Whisker } from "./parts/plot";
import { smooth, type Line } from "./series";
import type { Mark } from "./types";

export function smoothed(line: Line, weight: number): Line {
  if (line.low && line.high) {
    return { ...line, y: smooth(line.y, weight), low: smooth(line.low, weight), high: smooth(line.high, weight) };
  }
  return { ...line, raw: line.y, y: smooth(line.y, weight) };
}

export function metricLine({ run, metrics, colour }: Pair, name: string, time: boolean): Line {
  const y = metrics.columns[name];
  const x = places(metrics, time);
  return { label: run.name, colour, x: x && y ? x : [], y: x && y ? y : [], steps: metrics.steps };
}

export function evalLine({ run, metrics, colour }: Pair, time: boolean, measured: Measured): Line {
  const known = evaluations(metrics, measured).flatMap((e) => {
    const x = placeOf(metrics, e.step, time);
    return x === undefined ? [] : [{ x, y: e.mean, step: e.step }];
  });
  const steps = known.map((k) => k.step);
  return { label: run.name, colour, x: known.map((k) => k.x), y: known.map((k) => k.y), steps };
}

export function evalWhiskers({ run, metrics, colour }: Pair, time: boolean, measured: Measured): Whisker[] {
  return evaluations(metrics, measured).flatMap((e) => {
    const x = placeOf(metrics, e.step, time);
    return x === undefined || e.mean === null
      ? []
      : [{ label: run.name, x, mean: e.mean, low: e.low, high: e.high, colour }];
  });
}

export function placed({ run, metrics }: Pair, time: boolean, named: boolean): (Mark & { x: number })[] {
  return metrics.marks.flatMap((mark) => {
    const x = placeOf(metrics, mark.step, time);
    return x === undefined ? [] : [{ ...mark, x, text: named ? `${run.name}: ${mark.text}` : mark.text }];
  });
}
