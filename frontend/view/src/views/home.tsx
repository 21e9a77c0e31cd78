import { useState } from "preact/hooks";
import { runPath } from "../api";
import { link, type Page } from "../context";
import { ago, number } from "../format";
import { useApi, useClock, useSeen } from "../hooks";
import { Empty, heldOut, State } from "../parts/basics";
import { go, href } from "../route";
import type { Run, Summary } from "../types";

type Key = "name" | "state" | "step" | "updated" | "model" | "preset" | "seed" | "warnings";

const COLUMNS: readonly (readonly [Key, string])[] = [
  ["name", "Run"],
  ["state", "State"],
  ["step", "Step"],
  ["warnings", "Warnings"],
  ["preset", "Objective"],
  ["model", "Model"],
  ["seed", "Seed"],
  ["updated", "Changed"],
];

export function Home({ page }: { page: Page }) {
  const [search, setSearch] = useState("");
  const [order, setOrder] = useState<{ key: Key; up: boolean } | null>(null);
  if (!page.runs.length) {
    return (
      <Empty title="No runs here yet.">
        A run appears here as soon as its folder exists: start one with <code>trew train recipe.toml</code>, or give
        other folders to <code>trew view</code>.
      </Empty>
    );
  }
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  const found = sorted(page.runs, order).filter((run) => {
    const text = [run.name, run.path, run.model, run.preset, run.kind, run.state, `seed ${run.seed}`]
      .join(" ")
      .toLowerCase();
    return words.every((word) => text.includes(word));
  });
  const chosen = new Set(page.chosen.map((r) => r.id));
  const choose = (ids: string[]) => go(href("runs", new URLSearchParams(ids.map((id) => ["run", id]))));
  const toggle = (id: string) => choose(chosen.has(id) ? [...chosen].filter((c) => c !== id) : [...chosen, id]);
  const all = found.length > 0 && found.every((r) => chosen.has(r.id));
  // Of what the search leaves: runs that were chosen by another search stay chosen.
  const others = [...chosen].filter((id) => !found.some((r) => r.id === id));
  const toggleAll = () => choose(all ? others : [...others, ...found.map((r) => r.id)]);
  return (
    <>
      <div class="controls">
        <label class="field grow">
          <span>Search runs</span>
          <input
            type="search"
            data-search=""
            value={search}
            placeholder="name, model, objective, state …  (press /)"
            onInput={(e) => setSearch(e.currentTarget.value)}
          />
        </label>
        <label class="check">
          <input type="checkbox" checked={all} onChange={toggleAll} /> all {found.length}
        </label>
        {chosen.size > 0 && (
          <>
            <a class="button primary" href={link(page, "curves")}>
              Curves of {chosen.size}
            </a>
            {chosen.size > 1 && (
              <a class="button" href={link(page, "compare")}>
                Compare
              </a>
            )}
            <button type="button" onClick={() => choose([])}>
              Choose none
            </button>
          </>
        )}
      </div>
      {!found.length && <Empty title={`No run fits "${search}".`} />}
      {found.length > 0 && (
        <table class="runs">
          <thead>
            <tr>
              <th>
                <span class="hidden">Chosen</span>
              </th>
              {COLUMNS.map(([key, title]) => (
                <th key={key} aria-sort={order?.key === key ? (order.up ? "ascending" : "descending") : "none"}>
                  <button
                    type="button"
                    class="as-text"
                    onClick={() => setOrder(order?.key === key && !order.up ? null : { key, up: order?.key !== key })}
                  >
                    {title}
                    {order?.key === key ? (order.up ? " ↑" : " ↓") : ""}
                  </button>
                </th>
              ))}
              <th>Before</th>
              <th>After</th>
            </tr>
          </thead>
          <tbody>
            {found.map((run) => (
              <Line key={run.id} page={page} run={run} chosen={chosen.has(run.id)} onToggle={() => toggle(run.id)} />
            ))}
          </tbody>
        </table>
      )}
    </>
  );
}

function sorted(runs: readonly Run[], order: { key: Key; up: boolean } | null): Run[] {
  if (!order) return [...runs];
  const sign = order.up ? 1 : -1;
  return [...runs].sort((a, b) => {
    const [x, y] = [a[order.key], b[order.key]];
    const difference = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y));
    return sign * difference;
  });
}

const KINDS: Record<Run["kind"], string> = {
  policy: "",
  reward: "reward model",
  rounds: "policy and reward in rounds",
};

function Line({ page, run, chosen, onToggle }: { page: Page; run: Run; chosen: boolean; onToggle: () => void }) {
  const [ref, seen] = useSeen<HTMLTableRowElement>();
  const { data } = useApi<Summary>(seen ? runPath(run.id, "summary") : null, run.revision);
  const twin = page.runs.some((r) => r !== run && r.name === run.name);
  return (
    <tr ref={ref} class={chosen ? "chosen" : ""}>
      <td>
        <input type="checkbox" checked={chosen} aria-label={`Choose ${run.name}`} onChange={onToggle} />
      </td>
      <td class="run-name">
        <span class="swatch" style={{ background: page.colour(run.id) }} />{" "}
        <a href={href("curves", new URLSearchParams([["run", run.id]]))} title={run.path}>
          {run.name}
        </a>
        {twin && <span class="muted small"> in {run.path.split("/").slice(-3, -1).join("/")}</span>}
        {KINDS[run.kind] && <span class="tag">{KINDS[run.kind]}</span>}
      </td>
      <td>
        <State run={run} />
      </td>
      <td data-label="step">
        <Progress run={run} />
      </td>
      <td data-label="warnings">
        {run.warnings ? (
          <a class="tag warn" href={href("health", new URLSearchParams([["run", run.id]]))}>
            {run.warnings}
          </a>
        ) : (
          <span class="muted">0</span>
        )}
      </td>
      <td data-label="objective">{run.preset}</td>
      <td data-label="model" class="run-model" title={run.model}>
        {run.model}
      </td>
      <td data-label="seed">{run.seed}</td>
      <td data-label="changed" class="muted">
        <Ago unix={run.updated} />
      </td>
      <td data-label="before">{heldOut(data, "before")}</td>
      <td data-label="after">
        <b>{heldOut(data, "after")}</b>
      </td>
    </tr>
  );
}

/** Of a run that has stopped nothing else changes: without a clock it would have changed "now" for hours. */
function Ago({ unix }: { unix: number }) {
  useClock(5000);
  return <>{ago(unix)}</>;
}

function Progress({ run }: { run: Run }) {
  const share = run.steps ? Math.min(1, run.step / run.steps) : null;
  return (
    <span class="progress">
      {number(run.step)}
      {run.steps ? <span class="muted"> of {number(run.steps)}</span> : ""}
      {share !== null && run.state === "running" && (
        <progress max="1" value={share} aria-label={`${Math.round(share * 100)} % done`} />
      )}
    </span>
  );
}
