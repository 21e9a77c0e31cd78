/** The metrics of several runs, kept current: only the steps that are new are asked for. */

import { useEffect, useRef, useState } from "preact/hooks";
import { AGAIN_MS, get, NoAnswer, query, runPath } from "./api";
import { runColour } from "./colour";
import { hours, meanAndRange, type Line } from "./series";
import type { Eval, Metrics, Num, Run } from "./types";

export interface Known {
  metrics?: Metrics;
  error?: string;
}

/** Adds the rows of `news`, which begin after the last step of `old`. */
export function extend(old: Metrics, news: Metrics): Metrics {
  const before = old.steps.length;
  const names = new Set([...Object.keys(old.columns), ...Object.keys(news.columns)]);
  const columns: Record<string, Num[]> = {};
  for (const name of names) {
    const first = old.columns[name] ?? new Array<Num>(before).fill(null);
    const then = news.columns[name] ?? new Array<Num>(news.steps.length).fill(null);
    columns[name] = [...first, ...then];
  }
  return { ...news, steps: [...old.steps, ...news.steps], columns };
}

async function load(run: Run, old: Metrics | undefined, signal: AbortSignal): Promise<Metrics> {
  const last = old?.steps.at(-1);
  if (!old || last === undefined || run.read !== old.read) return get<Metrics>(runPath(run.id, "metrics"), signal);
  const news = await get<Metrics>(query(runPath(run.id, "metrics"), { since: last }), signal);
  // A run that was resumed has removed rows that we have; one that was overwritten, all of them.
  if (news.read !== old.read) return get<Metrics>(runPath(run.id, "metrics"), signal);
  return extend(old, news);
}

export function useMetrics(runs: readonly Run[]): Map<string, Known> {
  const [known, setKnown] = useState<Map<string, Known>>(new Map());
  const [heard, setHeard] = useState(0);
  const kept = useRef(new Map<string, Metrics>());
  const asking = useRef(new Map<string, AbortController>());
  const failed = useRef(new Map<string, string>());
  const wanted = runs.map((run) => `${run.id}\n${run.revision}`).join("\n\n");
  const current = useRef(runs);
  current.current = runs;
  useEffect(() => {
    const ids = new Set(current.current.map((run) => run.id));
    for (const [id, abort] of [...asking.current]) {
      if (ids.has(id)) continue;
      abort.abort();
      asking.current.delete(id);
    }
    for (const run of current.current) {
      const old = kept.current.get(run.id);
      // An answer on the way is heard to its end: of runs that change faster than it comes, nothing would be shown.
      if (asking.current.has(run.id) || failed.current.get(run.id) === run.revision) continue;
      if (old && old.revision === run.revision) continue;
      const abort = new AbortController();
      asking.current.set(run.id, abort);
      load(run, old, abort.signal)
        .then((metrics) => {
          if (abort.signal.aborted) return;
          kept.current.set(run.id, { ...metrics, revision: run.revision });
          setKnown((all) => new Map(all).set(run.id, { metrics }));
        })
        .catch((error: unknown) => {
          if (abort.signal.aborted) return;
          failed.current.set(run.id, run.revision);
          const message = error instanceof Error ? error.message : String(error);
          setKnown((all) => new Map(all).set(run.id, old ? { metrics: old, error: message } : { error: message }));
          if (!(error instanceof NoAnswer)) return;
          setTimeout(() => {
            failed.current.delete(run.id);
            setHeard((n) => n + 1);
          }, AGAIN_MS);
        })
        .finally(() => {
          if (abort.signal.aborted) return;
          asking.current.delete(run.id);
          setHeard((n) => n + 1);
        });
    }
  }, [wanted, heard]);
  useEffect(() => {
    const all = asking.current;
    return () => all.forEach((abort) => abort.abort());
  }, []);
  return known;
}

/** What an evaluation measured: "other" is in the place of the accuracies, see `ofSet`. */
export type Measured = "accuracy" | "loss" | "other";

export type Pair = { run: Run; metrics: Metrics; colour: string };

/** Evaluations by name: of the data sets, or of what was measured besides. */
type Named = "eval_sets" | "eval_others";

export function setNames(pairs: readonly Pair[], of: Named): string[] {
  return [...new Set(pairs.flatMap((p) => Object.keys(p.metrics[of] ?? {})))].sort();
}

/** The same runs with the evaluations of one name in the place of all. */
export function ofSet(pairs: readonly Pair[], of: Named, name: string): Pair[] {
  return pairs.map((p) => ({ ...p, metrics: { ...p.metrics, evals: p.metrics[of]?.[name] ?? [] } }));
}

/** What the evaluations of these runs measured, in words. */
export function aboutMeasured(measured: Measured, of: readonly { run: Run }[]): string {
  if (measured === "loss") {
    return of.every(({ run }) => run.given === "pairs")
      ? "mean loss per held-out pair"
      : "mean loss per answer token of the held-out rows";
  }
  return of.every(({ run }) => run.kind === "reward")
    ? "agreement with held-out pairs"
    : "accuracy on held-out prompts";
}

/** Every evaluation with its mean and interval, of accuracy or of the loss. */
export function evaluations(
  metrics: Metrics,
  measured: Measured,
): (Pick<Eval, "step" | "low" | "high"> & { mean: Num })[] {
  if (measured === "loss") return (metrics.losses ?? []).map((e) => ({ ...e, mean: e.loss }));
  return metrics.evals.map((e) => ({ ...e, mean: e.accuracy }));
}

/** The place of every step on the x axis: the step itself, or hours of training. */
export function places(metrics: Metrics, time: boolean): number[] | null {
  return time ? hours(metrics.columns["seconds"]) : metrics.steps;
}

export function placeOf(metrics: Metrics, step: number, time: boolean): number | undefined {
  if (!time) return step;
  const x = places(metrics, true);
  if (!x) return undefined;
  const at = metrics.steps.findLastIndex((s) => s <= step);
  return at < 0 ? 0 : x[at];
}

/** One line for each setting: the mean of its runs, with a band from the lowest to the highest. */
export function bands(pairs: Pair[], lines: Line[]): Line[] {
  const settings = Map.groupBy(
    lines.map((line, i) => ({ line, setting: pairs[i]?.run.setting ?? "" })),
    (each) => each.setting,
  );
  return [...settings.values()].flatMap((members, i) => {
    const known = members.map((m) => m.line).filter((l) => l.x.length);
    const first = known[0];
    if (!first) return [];
    const colour = runColour(i);
    if (known.length === 1) return [{ ...first, colour }];
    const { x, mean, low, high } = meanAndRange(known);
    return [
      {
        label: `${first.label} and ${known.length - 1} more of its setting (band: lowest to highest)`,
        colour,
        x,
        y: mean,
        low,
        high,
      },
    ];
  });
}
