import { useState } from "preact/hooks";
import { query, runPath } from "../api";
import { adjust, set, type Page } from "../context";
import { number, plural } from "../format";
import { useApi, useSettled } from "../hooks";
import { RowScore, STATUSES, tokensLink } from "../parts/answer";
import { Empty, Field, Segmented, Select } from "../parts/basics";
import { excerpt, Text } from "../parts/text";
import { VirtualList } from "../parts/virtual";
import type { Rollouts, Row, Run, Steps } from "../types";
import { rangeOf } from "../parts/steps";
import { NO_ROLLOUTS } from "./rollouts";

const FILTERS = [
  "text",
  "uid",
  "min_score",
  "max_score",
  "part",
  "min_part",
  "status",
  "truncated",
  "trained",
  "eval",
] as const;
const ORDERS = [
  ["step", "by step"],
  ["-score", "highest score first"],
  ["score", "lowest score first"],
  ["-length", "longest first"],
  ["length", "shortest first"],
] as const;

export function Search({ page }: { page: Page }) {
  const run = page.main;
  if (!run) return <Empty title="No run is chosen.">Choose one in the list of runs.</Empty>;
  if (!run.has_tokens) return <Empty title="No rollouts yet.">{NO_ROLLOUTS}</Empty>;
  return <Filters key={run.id} page={page} run={run} />;
}

function Filters({ page, run }: { page: Page; run: Run }) {
  const params = page.route.params;
  const value = (key: string) => params.get(key) ?? "";
  const put = (key: string) => (text: string) => adjust(page, { [key]: text });
  const [total, setTotal] = useState<number | undefined>();
  const settled = useSettled(params.toString(), 250);
  const wanted = new URLSearchParams(settled);
  const sort = wanted.get("sort") ?? "step";
  const filters = Object.fromEntries(FILTERS.flatMap((key) => (wanted.get(key) ? [[key, wanted.get(key) ?? ""]] : [])));
  const { data: steps } = useApi<Steps>(runPath(run.id, "steps"), run.revision);
  const parts = steps?.parts ?? [];
  // Before the first step has finished there are held-out completions alone.
  const isEval = (given: URLSearchParams) => !run.has_rollouts || given.has("eval");
  const anything = FILTERS.some((key) => params.has(key));
  return (
    <>
      <form
        class="controls filters"
        role="search"
        aria-label="Filters over all steps"
        onSubmit={(e) => e.preventDefault()}
      >
        <Field
          label="Text"
          value={value("text")}
          onInput={put("text")}
          placeholder="in prompt or completion (press /)"
          search
        />
        {!run.given && <ByScore value={value} put={put} />}
        {parts.length > 1 && (
          <>
            <Select
              label="Part"
              value={value("part")}
              options={[["", "any"], ...parts.map((p) => [p, p] as const)]}
              onChange={put("part")}
            />
            <Field label="at least" number value={value("min_part")} onInput={put("min_part")} />
          </>
        )}
        <Select
          label="Truncated"
          value={value("truncated")}
          options={[
            ["", "any"],
            ["1", "yes"],
            ["0", "no"],
          ]}
          onChange={put("truncated")}
        />
        <Select
          label="Trained on"
          value={value("trained")}
          options={[
            ["", "any"],
            ["1", "yes"],
            ["0", "no"],
          ]}
          onChange={put("trained")}
        />
        <Field label="Prompt's uid" value={value("uid")} onInput={put("uid")} />
        <Segmented
          label="Which rollouts"
          value={isEval(params) ? "eval" : "train"}
          options={[
            ["train", "Training"],
            ["eval", "Held-out"],
          ]}
          onChange={(v) => set(page, { eval: v === "eval" ? 1 : null })}
        />
        <Select
          label="Order"
          value={(params.get("sort") ?? "step") as "step"}
          options={ORDERS.filter(([key]) => !run.given || !key.endsWith("score")) as never}
          onChange={(v: string) => set(page, { sort: v === "step" ? null : v })}
        />
        {anything && (
          <button
            type="button"
            onClick={() => set(page, Object.fromEntries([...FILTERS, "sort"].map((key) => [key, null])))}
          >
            Clear filters
          </button>
        )}
      </form>
      <p class="count" role="status">
        {total === undefined ? " " : `${plural(total, "completion")}${anything ? " match" : ""}`}
      </p>
      <VirtualList<Row | null>
        label="Completions"
        url={(offset, limit) =>
          query(runPath(run.id, "rollouts"), { ...filters, eval: isEval(wanted) ? 1 : 0, sort, offset, limit })
        }
        revision={run.revision}
        read={(body) => body as Rollouts}
        height={76}
        onTotal={setTotal}
        empty={<Empty title="No completion matches.">Widen or clear the filters.</Empty>}
        row={(row) =>
          row ? (
            <Line page={page} row={row} find={wanted.get("text") ?? ""} range={steps && rangeOf(steps.steps)} />
          ) : (
            <p class="muted">This completion cannot be read: its table is damaged.</p>
          )
        }
      />
    </>
  );
}

function ByScore(props: { value: (key: string) => string; put: (key: string) => (text: string) => void }) {
  const { value, put } = props;
  return (
    <>
      <Field label="Score from" number value={value("min_score")} onInput={put("min_score")} />
      <Field label="to" number value={value("max_score")} onInput={put("max_score")} />
      <Select
        label="Status"
        value={value("status")}
        options={[["", "any"], ...Object.keys(STATUSES).map((s) => [s, s] as const)]}
        onChange={put("status")}
      />
    </>
  );
}

function Line({ page, row, find, range }: { page: Page; row: Row; find: string; range: [number, number] | undefined }) {
  const said = excerpt(row.completion, find);
  // The whole text was searched, and only its first characters are here: then the prompt may have what was looked for.
  const inPrompt = find && !row.completion.toLowerCase().includes(find.toLowerCase());
  return (
    <a class="line" href={tokensLink(page, row)}>
      <span class="line-facts">
        <RowScore row={row} range={range} />
        <span class="muted">
          step {row.step} · group {row.group} #{row.sample} · {number(row.length)} tokens
        </span>
        {row.status !== "scored" && <span class="tag warn">{row.status}</span>}
        {row.truncated && <span class="tag warn">truncated</span>}
        {row.extracted !== null && (
          <span class="line-answer">
            answer <Text text={excerpt(row.extracted, "", 60)} />
          </span>
        )}
      </span>
      <span class="line-text">
        <Text text={inPrompt ? `${excerpt(row.prompt, find, 120)}  →  ${said}` : said} find={find} />
      </span>
    </a>
  );
}
