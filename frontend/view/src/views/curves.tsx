import { useMemo, useState } from "preact/hooks";
import { adjust, set, type Page } from "../context";
import { useSeen } from "../hooks";
import { evalLine, evalWhiskers, metricLine, placed, smoothed } from "../lines";
import { aboutMeasured, bands, ofSet, setNames, useMetrics } from "../metrics";
import type { Known, Measured, Pair } from "../metrics";
import { Chart } from "../parts/chart";
import { Empty, Failure, Segmented } from "../parts/basics";
import { BeforeAfter } from "../parts/before_after";
import { whole } from "../route";
import type { Run } from "../types";

interface Options {
  weight: number;
  log: boolean;
  time: boolean;
  seeds: boolean;
  zoom: [number, number] | null;
}

const OPEN_GROUPS = 2;

export function Curves({ page }: { page: Page }) {
  const known = useMetrics(page.chosen);
  const params = page.route.params;
  const pairs = page.chosen.flatMap((run): Pair[] => {
    const metrics = known.get(run.id)?.metrics;
    return metrics ? [{ run, metrics, colour: page.colour(run.id) }] : [];
  });
  const from = whole(params, "from");
  const to = whole(params, "to");
  const options: Options = {
    weight: whole(params, "smooth") ?? 0,
    log: params.has("log"),
    time: params.has("time"),
    seeds: params.has("seeds"),
    zoom: from !== undefined && to !== undefined && to > from ? [from, to] : null,
  };
  const onZoom = (range: [number, number] | null) =>
    adjust(page, { from: range ? range[0].toPrecision(6) : null, to: range ? range[1].toPrecision(6) : null });
  if (!page.chosen.length) return <Empty title="No run is chosen.">Choose one or several in the list of runs.</Empty>;
  return (
    <>
      <Errors runs={page.chosen} known={known} />
      <BeforeAfter page={page} />
      <Controls page={page} options={options} onZoom={onZoom} />
      {pairs.length ? (
        <Groups page={page} pairs={pairs} options={options} onZoom={onZoom} />
      ) : (
        <Waiting known={known} />
      )}
    </>
  );
}

function Waiting({ known }: { known: Map<string, Known> }) {
  return [...known.values()].some((k) => k.error) ? null : <p class="loading">Loading …</p>;
}

function Errors({ runs, known }: { runs: Run[]; known: Map<string, Known> }) {
  return (
    <>
      {runs.map((run) => {
        const found = known.get(run.id);
        const error = found?.error ?? found?.metrics?.problem;
        return error && <Failure key={run.id} message={`${run.name}: ${error}`} />;
      })}
    </>
  );
}

function Controls({ page, options, onZoom }: { page: Page; options: Options; onZoom: (range: null) => void }) {
  const several = new Set(page.chosen.map((r) => r.setting)).size < page.chosen.length;
  return (
    <div class="controls" role="toolbar" aria-label="How curves are drawn">
      <label class="field grow">
        <span>Search metrics</span>
        <input
          type="search"
          data-search=""
          placeholder="reward, kl, clip …  (press /)"
          value={page.route.params.get("metric") ?? ""}
          onInput={(e) => adjust(page, { metric: e.currentTarget.value })}
        />
      </label>
      <label class="field">
        <span>Smoothing {options.weight ? options.weight.toFixed(2) : "off"}</span>
        <input
          type="range"
          min="0"
          max="0.99"
          step="0.01"
          value={String(options.weight)}
          onInput={(e) => adjust(page, { smooth: e.currentTarget.value === "0" ? null : e.currentTarget.value })}
        />
      </label>
      <Segmented
        label="Vertical axis"
        value={options.log ? "log" : "linear"}
        options={[
          ["linear", "Linear"],
          ["log", "Log", "Values of 0 and below are not drawn"],
        ]}
        onChange={(v) => set(page, { log: v === "log" ? 1 : null })}
      />
      <Segmented
        label="Horizontal axis"
        value={options.time ? "time" : "step"}
        options={[
          ["step", "Steps"],
          ["time", "Hours", "Hours of training: the steps' seconds summed"],
        ]}
        onChange={(v) => set(page, { time: v === "time" ? 1 : null, from: null, to: null })}
      />
      {several && (
        <Segmented
          label="Runs of one setting"
          value={options.seeds ? "band" : "each"}
          options={[
            ["each", "Each run"],
            [
              "band",
              "Mean and band",
              "Runs that differ in the seed only: their mean, and a band from the lowest to the highest",
            ],
          ]}
          onChange={(v) => set(page, { seeds: v === "band" ? 1 : null })}
        />
      )}
      {options.zoom && (
        <button type="button" onClick={() => onZoom(null)}>
          Reset zoom
        </button>
      )}
    </div>
  );
}

interface GroupsProps {
  page: Page;
  pairs: Pair[];
  options: Options;
  onZoom: (range: [number, number] | null) => void;
}

/** The sections of metrics: those of the first run, with what only others have; and pinned ones before all. */
function sections(pairs: Pair[], pinned: string[], search: string): { title: string; columns: string[] }[] {
  const sections = new Map<string, Set<string>>();
  for (const { metrics } of pairs) {
    for (const group of metrics.groups) {
      const known = sections.get(group.title) ?? new Set<string>();
      group.columns.forEach((column) => known.add(column));
      sections.set(group.title, known);
    }
  }
  const has = (column: string) => pairs.some((p) => p.metrics.columns[column]?.some((v) => v !== null));
  const fits = (column: string) => !search || column.toLowerCase().includes(search.toLowerCase());
  const all = [...sections].map(([title, columns]) => ({
    title,
    columns: [...columns].filter((c) => has(c) && fits(c)),
  }));
  return [{ title: "Pinned", columns: pinned.filter((c) => has(c) && fits(c)) }, ...all].filter(
    (s) => s.columns.length,
  );
}

function Groups({ page, pairs, options, onZoom }: GroupsProps) {
  const params = page.route.params;
  const search = params.get("metric") ?? "";
  // Names of an environment's metrics may have spaces.
  const pinned = (params.get("pin") ?? "").split("\n").filter(Boolean);
  const found = sections(pairs, pinned, search);
  const fits = (name: string) => !search || `held-out ${name} eval`.toLowerCase().includes(search.toLowerCase());
  const sets = setNames(pairs, "eval_sets").filter((name) => fits(`accuracy of ${name}`));
  const heldOut = pairs.some((p) => p.metrics.evals.length) && (fits("accuracy") || sets.length > 0);
  const heldOutLoss = pairs.some((p) => p.metrics.losses?.length) && fits("loss");
  const others = setNames(pairs, "eval_others").filter(fits);
  if (!found.length && !heldOut && !heldOutLoss && !others.length) return <Nothing pairs={pairs} search={search} />;
  const shared = { page, pairs, options, onZoom, pinned };
  return (
    <>
      {heldOut && <HeldOut {...shared} all={fits("accuracy")} sets={sets} />}
      {heldOutLoss && (
        <section>
          <h2>Held-out loss</h2>
          <div class="charts wide">
            <Panel {...shared} name="held-out loss" measured="loss" />
          </div>
        </section>
      )}
      <Others {...shared} names={others} />
      {found.map((section, i) => (
        <details key={section.title} class="section" open={i < OPEN_GROUPS || !!search || section.title === "Pinned"}>
          <summary>
            <h2>{section.title}</h2> <span class="muted">{section.columns.length}</span>
          </summary>
          <div class="charts">
            {section.columns.map((name) => (
              <Panel key={name} {...shared} name={name} />
            ))}
          </div>
        </details>
      ))}
    </>
  );
}

function Nothing({ pairs, search }: { pairs: Pair[]; search: string }) {
  if (search) return <Empty title={`No metric has "${search}" in its name.`} />;
  if (pairs.some((p) => p.metrics.problem)) return null; // they cannot be read, which is said above
  return <Empty title="No metrics yet.">The first step has not finished. Curves appear here by themselves.</Empty>;
}

/** The accuracy over all held-out prompts, and that of each data set. */
function HeldOut({ all, sets, ...shared }: GroupsProps & { pinned: string[]; all: boolean; sets: string[] }) {
  return (
    <section>
      <h2>Held-out accuracy</h2>
      {all && (
        <div class="charts wide">
          <Panel {...shared} name="held-out accuracy" measured="accuracy" />
        </div>
      )}
      <div class="charts">
        {sets.map((name) => (
          <Panel
            key={name}
            {...shared}
            pairs={ofSet(shared.pairs, "eval_sets", name)}
            name={`held-out accuracy of ${name}`}
            measured="accuracy"
          />
        ))}
      </div>
    </section>
  );
}

function Others({ names, ...shared }: GroupsProps & { pinned: string[]; names: string[] }) {
  if (!names.length) return null;
  return (
    <section>
      <h2>Held-out: other measures</h2>
      <div class="charts">
        {names.map((n) => (
          <Panel
            key={n}
            {...shared}
            pairs={ofSet(shared.pairs, "eval_others", n)}
            name={`held-out ${n}`}
            measured="other"
          />
        ))}
      </div>
    </section>
  );
}

interface PanelProps extends GroupsProps {
  name: string;
  pinned: string[];
  /** What evaluations measured, instead of a column of every step. */
  measured?: Measured;
}

function helpOf({ pairs, name, options, measured }: PanelProps): string | undefined {
  if (measured === "other") return undefined;
  if (measured) return `${aboutMeasured(measured, pairs)}${options.seeds ? "" : ", with its 95 % interval"}`;
  return pairs.map((p) => p.metrics.help[name]).find(Boolean);
}

function Panel(props: PanelProps) {
  const { page, name, options, pinned, measured } = props;
  const [ref, seen] = useSeen<HTMLElement>();
  const [large, setLarge] = useState(false);
  const help = helpOf(props);
  const isPinned = pinned.includes(name);
  const pin = () => set(page, { pin: (isPinned ? pinned.filter((c) => c !== name) : [...pinned, name]).join("\n") });
  return (
    <figure ref={ref} class="panel">
      <figcaption>
        <span class="panel-name">{name}</span>
        {help && <span class="panel-help">{help}</span>}
        <span class="panel-tools">
          {!measured && (
            <button
              type="button"
              class="icon"
              aria-pressed={isPinned}
              title={isPinned ? "Unpin" : "Pin to the top"}
              aria-label={`Pin ${name}`}
              onClick={pin}
            >
              {isPinned ? "★" : "☆"}
            </button>
          )}
          <button
            type="button"
            class="icon"
            title={large ? "Smaller" : "Larger"}
            aria-label={`Show ${name} larger`}
            aria-pressed={large}
            onClick={() => setLarge(!large)}
          >
            ⤢
          </button>
        </span>
      </figcaption>
      <div class={large ? "panel-large" : "panel-usual"}>
        {seen && <Drawing {...props} options={options} height={large ? 420 : 190} />}
      </div>
    </figure>
  );
}

function Drawing({ pairs, name, options, onZoom, measured, height }: PanelProps & { height: number }) {
  const { weight, log, time, seeds } = options;
  const lines = useMemo(() => {
    const each = pairs.map((pair) => (measured ? evalLine(pair, time, measured) : metricLine(pair, name, time)));
    const grouped = seeds ? bands(pairs, each) : each.filter((l) => l.x.length);
    return measured || !weight ? grouped : grouped.map((line) => smoothed(line, weight));
  }, [pairs, name, weight, time, seeds, measured]);
  const whiskers = useMemo(
    () => (measured && !seeds ? pairs.flatMap((p) => evalWhiskers(p, time, measured)) : []),
    [pairs, measured, seeds, time],
  );
  const marks = useMemo(() => pairs.flatMap((p) => placed(p, time, pairs.length > 1)), [pairs, time]);
  if (!lines.length) return <p class="muted">No values{time ? " with a time" : ""}.</p>;
  const last = lines.map((l) => ({ ...l, last: l.y.findLast((v) => v !== null) }));
  return (
    <>
      <Chart
        title={name}
        height={height}
        lines={lines}
        whiskers={whiskers}
        marks={marks}
        log={log}
        zoom={options.zoom}
        xTitle={time ? "hour" : "step"}
        onZoom={onZoom}
      />
      {last.length > 1 && (
        <ul class="legend">
          {last.map((l) => (
            <li key={l.label}>
              <span class="swatch" style={{ background: l.colour }} /> {l.label}
            </li>
          ))}
        </ul>
      )}
    </>
  );
}
