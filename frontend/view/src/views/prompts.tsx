import { useState } from "preact/hooks";
import { query, runPath } from "../api";
import { adjust, set, type Page } from "../context";
import { number, plural, signed } from "../format";
import { useApi, useSettled } from "../hooks";
import { Card, gold, Prompt } from "../parts/answer";
import { Empty, Field, Loaded, Score, Select } from "../parts/basics";
import { excerpt, Text } from "../parts/text";
import { VirtualList } from "../parts/virtual";
import type { PromptHistory, PromptInfo, Prompts as PromptPage, Run, Steps } from "../types";
import { rangeOf } from "../parts/steps";
import { NO_ROLLOUTS } from "./rollouts";

const ORDERS = [
  ["gain", "largest gain first"],
  ["loss", "largest loss first"],
  ["disagreement", "most disagreement first"],
  ["uid", "by name"],
] as const;

export function Prompts({ page }: { page: Page }) {
  const run = page.main;
  if (!run) return <Empty title="No run is chosen.">Choose one in the list of runs.</Empty>;
  if (!run.has_tokens) return <Empty title="No rollouts yet.">{NO_ROLLOUTS}</Empty>;
  const params = page.route.params;
  const uid = params.get("uid");
  if (uid === null) return <List key={run.id} page={page} run={run} />;
  return <Through page={page} run={run} uid={uid} hash={params.get("prompt_hash") ?? ""} />;
}

function List({ page, run }: { page: Page; run: Run }) {
  const params = page.route.params;
  // What was not judged has no gains to be sorted by.
  const sort = run.given ? "uid" : (ORDERS.find(([key]) => key === params.get("sort"))?.[0] ?? "gain");
  const text = useSettled(params.get("text") ?? "", 250);
  const [total, setTotal] = useState<number | undefined>();
  const { data: steps } = useApi<Steps>(runPath(run.id, "steps"), run.revision);
  const range = steps && rangeOf(steps.steps);
  return (
    <>
      <div class="controls">
        {!run.given && <Select label="Order" value={sort} options={ORDERS} onChange={(v) => set(page, { sort: v })} />}
        <Field
          label="Text of the prompt"
          value={params.get("text") ?? ""}
          onInput={(t) => adjust(page, { text: t })}
          placeholder="press /"
          search
        />
        <p class="count" role="status">
          {total === undefined ? " " : plural(total, "prompt")}
        </p>
      </div>
      <VirtualList<PromptInfo>
        label="Prompts"
        url={(offset, limit) => query(runPath(run.id, "prompts"), { sort, text, offset, limit })}
        revision={run.revision}
        read={(body) => ({ total: (body as PromptPage).total, rows: (body as PromptPage).prompts })}
        height={76}
        onTotal={setTotal}
        empty={<Empty title={text ? "No prompt has this text." : "No prompts yet."} />}
        row={(prompt) => <Line page={page} prompt={prompt} find={text} judged={!run.given} range={range} />}
      />
    </>
  );
}

interface LineProps {
  page: Page;
  prompt: PromptInfo;
  find: string;
  judged: boolean;
  range: [number, number] | undefined;
}

function Line({ page, prompt, find, judged, range }: LineProps) {
  const right = gold(prompt.gold);
  return (
    <button type="button" class="line" onClick={() => set(page, { uid: prompt.uid, prompt_hash: prompt.prompt_hash })}>
      <span class="line-facts">
        {judged && <Gain prompt={prompt} range={range} />}
        <span class="muted">
          {prompt.times < 2
            ? `step ${prompt.last.step} only`
            : `steps ${prompt.first.step} to ${prompt.last.step}, ${prompt.times} times`}
        </span>
        {prompt.disagreement !== null && <span class="muted">disagreement {number(prompt.disagreement)}</span>}
        {right !== null && (
          <span class="line-answer">
            gold <Text text={excerpt(right, "", 60)} />
          </span>
        )}
      </span>
      <span class="line-text">
        <Text text={excerpt(prompt.prompt.trim(), find)} find={find} />
      </span>
    </button>
  );
}

/** Scores have the colours that they have in every other view. */
function Gain({ prompt, range: [low, high] = [0, 1] }: Pick<LineProps, "prompt" | "range">) {
  if (prompt.times < 2) return <Score value={prompt.last.mean} low={low} high={high} />;
  const gain = prompt.gain ?? 0;
  return (
    <>
      <Score value={prompt.first.mean} low={low} high={high} /> →{" "}
      <Score value={prompt.last.mean} low={low} high={high} />
      <b class={gain < 0 ? "down" : gain > 0 ? "up" : ""}>{signed(prompt.gain)}</b>
    </>
  );
}

/** `hash`: of the text, empty in an address that was made by hand or by an earlier version. */
function Through({ page, run, uid, hash }: { page: Page; run: Run; uid: string; hash: string }) {
  const answer = useApi<PromptHistory>(query(runPath(run.id, "prompt"), { uid, prompt_hash: hash }), run.revision);
  const { data: steps } = useApi<Steps>(runPath(run.id, "steps"), run.revision);
  const range = steps && rangeOf(steps.steps);
  return (
    <>
      <p>
        <button type="button" onClick={() => set(page, { uid: null, prompt_hash: null })}>
          ← All prompts
        </button>
      </p>
      <Loaded answer={answer} show={(data) => <History page={page} data={data} range={range} />} />
    </>
  );
}

function History({ page, data, range }: { page: Page; data: PromptHistory; range: [number, number] | undefined }) {
  const right = gold(data.gold);
  return (
    <>
      <section class="group">
        <header>
          <div class="group-facts">
            <b>Prompt</b> <Text text={data.uid} class="muted" />
            {right !== null && (
              <span class="gold">
                gold <Text text={excerpt(right, "", 200)} />
              </span>
            )}
          </div>
          <Prompt text={data.prompt} open />
          {data.total > data.visits.length && (
            <p class="note">
              Of {data.total.toLocaleString("en-US")} visits, the first and the last {data.visits.length / 2} are shown.
            </p>
          )}
        </header>
        {data.visits.some((visit) => visit.mean !== null) && <TimeLine visits={data.visits} range={range ?? [0, 1]} />}
      </section>
      {data.visits.map((visit, i) => (
        <details
          key={`${visit.step} ${visit.eval}`}
          id={`visit-${i}`}
          class="section"
          open={i === 0 || i === data.visits.length - 1 || data.visits.length <= 6}
        >
          <summary>
            <h2>
              {visit.eval ? "Held-out evaluation after" : "Training"} step {visit.step}
            </h2>{" "}
            <span class="muted">
              {visit.mean !== null && `mean ${number(visit.mean)}, `}
              {plural(visit.rows.length, "completion")}
            </span>
          </summary>
          <div class="cards">
            {visit.rows.map((row) => (
              <Card key={row.sample} page={page} row={row} range={range} />
            ))}
          </div>
        </details>
      ))}
      {!data.visits.length && <Empty title="No completion of this prompt was found." />}
    </>
  );
}

/** Every completion as a dot over the steps, and the mean of each visit as a line. */
function TimeLine({ visits, range: [low, high] }: { visits: PromptHistory["visits"]; range: [number, number] }) {
  const steps = visits.map((v) => v.step);
  const [first, last] = [Math.min(...steps), Math.max(...steps)];
  const x = (step: number) => 40 + (last > first ? (step - first) / (last - first) : 0.5) * 540;
  const y = (score: number) => 96 - ((score - low) / (high - low || 1)) * 84;
  const means = visits.flatMap((v) => (v.mean === null ? [] : [`${x(v.step).toFixed(1)},${y(v.mean).toFixed(1)}`]));
  const jump = (i: number) => {
    const target = document.getElementById(`visit-${i}`) as HTMLDetailsElement | null;
    if (!target) return;
    target.open = true;
    target.scrollIntoView({ block: "start" });
  };
  return (
    <svg
      class="timeline"
      viewBox="0 0 600 122"
      role="img"
      aria-label={`Score over steps: ${visits.map((v) => `step ${v.step} mean ${number(v.mean)}`).join(", ")}`}
    >
      {[low, high].map((v) => (
        <g key={v}>
          <line class="ba-grid" x1="40" x2="580" y1={y(v)} y2={y(v)} />
          <text x="34" y={y(v) + 4} text-anchor="end">
            {number(v)}
          </text>
        </g>
      ))}
      <polyline points={means.join(" ")} />
      {visits.map((v, i) => (
        <g key={i} class={`visit ${v.eval ? "eval" : ""}`} onClick={() => jump(i)}>
          <title>{`step ${v.step}${v.eval ? " (held-out)" : ""}: mean ${number(v.mean)}`}</title>
          {v.rows.map(
            (row, k) =>
              row.score !== null && <circle key={k} cx={x(v.step) + ((k % 5) - 2) * 2} cy={y(row.score)} r="3" />,
          )}
        </g>
      ))}
      <text x="40" y="118">
        step {first}
      </text>
      {last > first && (
        <text x="580" y="118" text-anchor="end">
          step {last}
        </text>
      )}
    </svg>
  );
}
