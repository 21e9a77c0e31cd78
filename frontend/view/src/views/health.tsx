import { runPath } from "../api";
import type { Page } from "../context";
import { bytes, number, percent, plain, seconds } from "../format";
import { useApi } from "../hooks";
import { BeforeAfter } from "../parts/before_after";
import { Empty, Failure, Loaded, State } from "../parts/basics";
import { Memory } from "../parts/memory";
import { Text } from "../parts/text";
import { link } from "../context";
import type { Cluster, Finding, Num, Run, Summary } from "../types";

export function Health({ page }: { page: Page }) {
  const run = page.main;
  const answer = useApi<Summary>(run ? runPath(run.id, "summary") : null, run?.revision);
  if (!run) return <Empty title="No run is chosen.">Choose one in the list of runs.</Empty>;
  return (
    <Loaded
      answer={answer}
      show={(data) => (
        <>
          <section>
            <h2>
              {run.name} <State run={run} />
            </h2>
            <p class="muted path">{run.path}</p>
            <BeforeAfter page={{ ...page, chosen: [run] }} />
            {data.outcome?.map((text) => (
              <p key={text} class="note">
                {text}
              </p>
            ))}
            {data.problems?.map((text) => (
              <Failure key={text} message={text} />
            ))}
          </section>
          <Warnings page={page} run={run} found={data.health} />
          <Figures data={data} run={run} />
          <Memory memory={data.memory} />
          <Several cluster={data.cluster} />
        </>
      )}
    />
  );
}

function Warnings({ page, run, found }: { page: Page; run: Run; found: Finding[] }) {
  return (
    <section>
      <h2>Warnings</h2>
      {!found.length && (
        <p class="fine">No health rule applies{run.state === "running" ? ` up to step ${run.step}` : ""}.</p>
      )}
      <ul class="warnings">
        {found.map((f, i) => (
          <li key={i}>
            <p>
              <span class="tag warn">{f.rule}</span>{" "}
              <b>
                {f.step_to === f.step_from
                  ? `step ${f.step_from}`
                  : f.step_to === null
                    ? `since step ${f.step_from}`
                    : `steps ${f.step_from} to ${f.step_to}`}
              </b>{" "}
              <a href={link(page, "rollouts", { step: f.step_from })}>Rollouts of this step</a>
            </p>
            <Text text={f.text} />
            {f.advice && (
              <p class="advice">
                <b>What to do: </b>
                <Text text={f.advice} />
              </p>
            )}
          </li>
        ))}
      </ul>
    </section>
  );
}

const FIGURES: readonly (readonly [string, string, (v: number) => string])[] = [
  ["seconds", "training time", seconds],
  ["tokens_per_second", "completion tokens per second", number],
  ["peak_memory_bytes", "peak memory", bytes],
  ["n_eval", "held-out prompts", number],
  ["steps", "steps", number],
  ["seed", "seed", plain],
];

function Figures({ data, run }: { data: Summary; run: Run }) {
  const summary = data.summary;
  // Empty where there is no summary.json.
  if (!summary || !Object.keys(summary).length) {
    const damaged = data.problems?.some((text) => text.startsWith("summary.json:"));
    return (
      <section>
        <h2>Figures</h2>
        <p class="muted">
          {run.state === "running"
            ? "They are written when the run finishes."
            : damaged
              ? "The run's summary cannot be read."
              : "The run did not finish, so it wrote no summary."}
        </p>
      </section>
    );
  }
  const words = ["task", "model", "objective", "device"].filter((key) => typeof summary[key] === "string");
  return (
    <section>
      <h2>Figures</h2>
      <dl class="figures">
        {words.map((key) => (
          <div key={key}>
            <dt>{key}</dt>
            <dd>{plain(summary[key])}</dd>
          </div>
        ))}
        {FIGURES.map(([key, title, show]) => {
          const value = summary[key];
          return typeof value === "number" ? (
            <div key={key}>
              <dt>{key === "n_eval" && run.given ? "held-out rows" : title}</dt>
              <dd>{show(value)}</dd>
            </div>
          ) : null;
        })}
      </dl>
      <details>
        <summary>Everything in summary.json</summary>
        <Text text={JSON.stringify(summary, null, 2)} class="code" />
      </details>
    </section>
  );
}

function Several({ cluster }: { cluster: Cluster | null }) {
  if (!cluster) return null;
  const facts: [string, string][] = [
    ["learner ranks", plain(cluster.ranks)],
    ["servers", number(cluster.servers.length)],
    ["version of the weights: updates so far", plain(cluster.versions)],
  ];
  return (
    <section>
      <h2>Ranks, servers and versions</h2>
      <Facts facts={facts} />
      <Table rows={cluster.servers} empty="The learner's own processes generate; there are no servers." />
      <Staleness cluster={cluster} />
    </section>
  );
}

function Facts({ facts }: { facts: [string, string][] }) {
  return (
    <dl class="figures">
      {facts.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

function waited(value: Num): string {
  return value === null ? "–" : `${value < 10 ? number(Math.round(value * 100) / 100) : Math.round(value)} s`;
}

/** How old the groups of the newest step were, and who waited for whom. */
function Staleness({ cluster }: { cluster: Cluster }) {
  const ages = Object.entries(cluster.ages ?? {}).sort(([a], [b]) => Number(a) - Number(b));
  if (!ages.length) return null;
  const facts: [string, string][] = [
    ["bound (cluster.staleness)", plain(cluster.staleness)],
    ["mean age", number(cluster.age_mean)],
    ["greatest age", number(cluster.age_max)],
    ["the learner waited for groups", waited(cluster.waited_s)],
    ["servers were idle", waited(cluster.idle_s)],
  ];
  return (
    <>
      <h3>Staleness in the newest step</h3>
      <p class="muted">Age: how many versions lie between a group's oldest token and the weights that trained on it.</p>
      <Facts facts={facts} />
      <table class="plain">
        <thead>
          <tr>
            <th>age</th>
            <th>share of groups</th>
          </tr>
        </thead>
        <tbody>
          {ages.map(([age, share]) => (
            <tr key={age}>
              <th scope="row">{age}</th>
              <td>{percent(share)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </>
  );
}

/** Rows of whatever keys they have. */
function Table({ rows, empty }: { rows: unknown[]; empty: string }) {
  if (!rows?.length) return <p class="muted">{empty}</p>;
  const objects = rows.map((r) =>
    typeof r === "object" && r !== null ? (r as Record<string, unknown>) : { server: r },
  );
  const keys = [...new Set(objects.flatMap(Object.keys))];
  return (
    <div class="scroll">
      <table class="plain">
        <thead>
          <tr>
            {keys.map((k) => (
              <th key={k}>{k.replaceAll("_", " ")}</th>
            ))}
          </tr>
        </thead>
        <tbody>
          {objects.map((o, i) => (
            <tr key={i}>
              {keys.map((k) => (
                <td key={k}>
                  <Text text={plain(o[k])} />
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
