import { query } from "../api";
import type { Page } from "../context";
import { link } from "../context";
import { number, percent, plain, plural, short, signed } from "../format";
import { useApi } from "../hooks";
import { Empty, Loaded } from "../parts/basics";
import { Text } from "../parts/text";
import type { Comparison, Interval } from "../types";

export function Compare({ page }: { page: Page }) {
  const ids = page.chosen.map((r) => r.id);
  const revision = page.chosen.map((r) => r.revision).join();
  const answer = useApi<Comparison>(ids.length > 1 ? query("api/compare", { run: ids }) : null, revision);
  if (ids.length < 2) {
    return (
      <Empty title="A comparison needs several runs.">
        Choose runs of at least two settings, with several seeds each, in the{" "}
        <a href={link(page, "runs")}>list of runs</a>.
      </Empty>
    );
  }
  if (answer.error && !answer.loading) return <Refused message={answer.error} />;
  return <Loaded answer={answer} show={(data) => <Result data={data} />} />;
}

/** The refusal says what differs, what can be said all the same, and what to do. */
function Refused({ message }: { message: string }) {
  return (
    <section class="refused">
      <h2>No comparison of these runs</h2>
      <Text text={message.replace(/^compare: /, "")} />
      <p class="muted">
        Their curves can still be laid over each other. <code>trew compare --help</code> explains the options that allow
        more.
      </p>
    </section>
  );
}

const VERDICTS: Record<string, string> = { better: "up", worse: "down" };

function Result({ data }: { data: Comparison }) {
  const groups = data.groups ?? [];
  const comparisons = data.comparisons ?? [];
  const differing = Object.entries(data.settings_that_differ ?? {});
  return (
    <>
      <section>
        <h2>{data.metric?.title ?? "Comparison"}</h2>
        <p class="muted">
          {plural(groups.length, "group")} of runs, paired by seed; {data.metric?.better} is better. Bars are{" "}
          {percent(data.level)} intervals.
        </p>
        <Forest
          title="Mean of each group"
          rows={groups.map((g) => ({
            name: g.name,
            note: `${plural(g.runs.length, "run")}, sd ${number(g.sd)}`,
            interval: g.mean,
            dots: g.runs.map((r) => r.score),
          }))}
        />
      </section>
      {comparisons.length > 0 && (
        <section>
          <h2>Against {data.baseline}</h2>
          <Forest
            title={`Difference to ${data.baseline}`}
            zero
            rows={comparisons.map((c) => ({
              name: c.name,
              note: c.verdict,
              tone: VERDICTS[c.verdict] ?? "",
              interval: c.difference,
              dots: [],
            }))}
          />
          <div class="scroll">
            <table class="plain">
              <thead>
                <tr>
                  <th>minus the baseline</th>
                  <th>difference</th>
                  <th title="Sign-flip test of the paired differences, corrected for the number of comparisons (Holm)">
                    p
                  </th>
                  <th title="The chance that a run of the group beats a run of the baseline">P(better)</th>
                  <th title="The true difference that these seeds find in 80 of 100 studies">would be found</th>
                  <th>pairs</th>
                  <th>verdict</th>
                </tr>
              </thead>
              <tbody>
                {comparisons.map((c) => (
                  <tr key={c.name}>
                    <th scope="row">{c.name}</th>
                    <td>{ends(c.difference, signed)}</td>
                    <td>{number(c.p_value)}</td>
                    <td>{ends(c.probability_of_improvement, number)}</td>
                    <td>{number(c.detectable_difference)}</td>
                    <td>{c.pairs}</td>
                    <td>
                      <b class={VERDICTS[c.verdict] ?? ""}>{c.verdict}</b>
                    </td>
                  </tr>
                ))}
              </tbody>
            </table>
          </div>
          <Needed data={data} />
        </section>
      )}
      <section>
        <h2>Settings that differ</h2>
        <div class="scroll">
          <table class="plain">
            <thead>
              <tr>
                <th>setting</th>
                {groups.map((g) => (
                  <th key={g.name}>{g.name}</th>
                ))}
              </tr>
            </thead>
            <tbody>
              {differing.map(([key, values]) => (
                <tr key={key}>
                  <th scope="row">{key}</th>
                  {groups.map((g) => (
                    <td key={g.name}>{plain(values[g.name])}</td>
                  ))}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      </section>
      <Notes data={data} />
    </>
  );
}

function ends(i: Interval, show: (v: number | null) => string): string {
  return i.mean === null ? "–" : `${show(i.mean)} [${show(i.low)}, ${show(i.high)}]`;
}

function Needed({ data }: { data: Comparison }) {
  return (
    <ul class="muted">
      {(data.comparisons ?? [])
        .filter((c) => Object.keys(c.seeds_needed).length)
        .map((c) => (
          <li key={c.name}>
            Pairs needed at the spread of {c.name}:{" "}
            {Object.entries(c.seeds_needed)
              .map(([size, count]) => `${count.toLocaleString("en-US")} for ${size}`)
              .join(", ")}
            .
          </li>
        ))}
    </ul>
  );
}

function Notes({ data }: { data: Comparison }) {
  const notes = [
    ...(data.notes ?? []),
    ...(data.not_compared ?? []).map((name) => `${name} is shown and not compared.`),
    ...(data.left_out ?? []).map((name) => `${name} has not finished and is left out.`),
  ];
  if (!notes.length) return null;
  return (
    <section>
      <h2>Before you believe these numbers</h2>
      <ul>
        {notes.map((note, i) => (
          <li key={i}>
            <Text text={note} />
          </li>
        ))}
      </ul>
    </section>
  );
}

interface ForestRow {
  name: string;
  note: string;
  tone?: string;
  interval: Interval;
  dots: number[];
}

/** Means with intervals under each other on one axis, and single runs as dots. */
function Forest({ title, rows, zero = false }: { title: string; rows: ForestRow[]; zero?: boolean }) {
  const known = rows
    .flatMap((r) => [r.interval.low, r.interval.mean, r.interval.high, ...r.dots])
    .filter((v): v is number => v !== null);
  if (!known.length) return null;
  if (zero) known.push(0);
  const [min, max] = [Math.min(...known), Math.max(...known)];
  // All the same: the axis has a width all the same.
  const pad = max > min ? (max - min) * 0.06 : 0.05;
  const x = (v: number) => ((v - min + pad) / (max - min + 2 * pad)) * 100;
  return (
    <div class="forest" role="group" aria-label={title}>
      {rows.map((r) => (
        <div key={r.name} class="forest-row">
          <span class="forest-name">
            {r.name} <span class={`muted ${r.tone ?? ""}`}>{r.note}</span>
          </span>
          <svg class="forest-plot" role="img" aria-label={`${r.name}: ${ends(r.interval, zero ? signed : number)}`}>
            {zero && <line class="forest-zero" x1={`${x(0)}%`} x2={`${x(0)}%`} y1="0" y2="28" />}
            {r.dots.map((d, i) => (
              <circle key={i} class="forest-dot" cx={`${x(d)}%`} cy={14 + ((i % 3) - 1) * 5} r="2.5" />
            ))}
            {r.interval.low !== null && r.interval.high !== null && (
              <line class="forest-line" x1={`${x(r.interval.low)}%`} x2={`${x(r.interval.high)}%`} y1="14" y2="14" />
            )}
            {r.interval.mean !== null && <circle class="forest-mean" cx={`${x(r.interval.mean)}%`} cy="14" r="5" />}
          </svg>
          <span class="forest-words">{ends(r.interval, zero ? signed : number)}</span>
        </div>
      ))}
      <div class="forest-row forest-axis">
        <span />
        <span class="bar-ends">
          <span>{short(min - pad, max - min)}</span>
          <span>{short(max + pad, max - min)}</span>
        </span>
        <span />
      </div>
    </div>
  );
}
