import { useState } from "preact/hooks";
import { query, runPath } from "../api";
import { adjust, set, type Page } from "../context";
import { number, plural } from "../format";
import { useApi, useKeys, useSettled } from "../hooks";
import { Card, gold, Prompt, promptLink } from "../parts/answer";
import { Empty, Loaded, Segmented, Select } from "../parts/basics";
import { rangeOf, StepSlider } from "../parts/steps";
import { excerpt, Text } from "../parts/text";
import { whole } from "../route";
import type { Group, Groups, Run, StepInfo, Steps } from "../types";

const MANY = 12;

export const NO_ROLLOUTS =
  "The first step of this run has not finished, or its folder has no rollouts. They appear here by themselves.";

export function Rollouts({ page }: { page: Page }) {
  const run = page.main;
  const answer = useApi<Steps>(run ? runPath(run.id, "steps") : null, run?.revision);
  if (!run) return <Empty title="No run is chosen.">Choose one in the list of runs.</Empty>;
  return (
    <Loaded
      answer={answer}
      show={(data) =>
        data.steps.length || data.evals.length ? (
          <Steps_ page={page} run={run} data={data} />
        ) : (
          <Empty title="No rollouts yet.">{NO_ROLLOUTS}</Empty>
        )
      }
    />
  );
}

function Steps_({ page, run, data }: { page: Page; run: Run; data: Steps }) {
  const params = page.route.params;
  const isEval = (params.has("eval") && data.evals.length > 0) || !data.steps.length;
  const steps = isEval ? data.evals.map(asStep) : data.steps;
  const { step, missing } = stepOf(steps, whole(params, "step"));
  return (
    <>
      <div class="controls">
        <Segmented
          label="Which rollouts"
          value={isEval ? "eval" : "train"}
          options={[
            ["train", `Training (${data.steps.length})`],
            ["eval", `Held-out (${data.evals.length})`],
          ]}
          onChange={(v) => set(page, { eval: v === "eval" ? 1 : null, step: null })}
        />
        {!run.given && (
          <Select
            label="Order of groups"
            value={(params.get("sort") ?? "group") as "group"}
            options={[
              ["group", "as sampled"],
              ["disagreement" as "group", "most disagreement first"],
              ["-mean" as "group", "highest reward first"],
              ["mean" as "group", "lowest reward first"],
            ]}
            onChange={(v) => set(page, { sort: v === "group" ? null : v })}
          />
        )}
      </div>
      <Unreadable files={data.unreadable ?? []} />
      {missing !== undefined && (
        <p class="note">
          Step {missing} has no rollouts; this is step {step}.
        </p>
      )}
      <StepSlider steps={steps} step={step} given={run.given} onStep={(s) => adjust(page, { step: s })} />
      <GroupList page={page} run={run} step={step} isEval={isEval} range={rangeOf(data.steps)} />
    </>
  );
}

/** The step in the address, or the newest one, which is followed while the run trains. */
function stepOf(steps: StepInfo[], wanted: number | undefined): { step: number; missing?: number } {
  const newest = steps.at(-1)?.step ?? 0;
  if (wanted === undefined) return { step: newest };
  return steps.some((s) => s.step === wanted) ? { step: wanted } : { step: newest, missing: wanted };
}

function Unreadable({ files }: { files: string[] }) {
  if (!files.length) return null;
  return (
    <details class="failure">
      <summary>
        {plural(files.length, "file")} of this run could not be read and {files.length === 1 ? "is" : "are"} missing
        here
      </summary>
      {files.map((text) => (
        <p key={text}>{text}</p>
      ))}
    </details>
  );
}

function asStep(e: Steps["evals"][number]): StepInfo {
  return {
    step: e.step,
    rows: e.rows,
    groups: e.groups ?? e.rows,
    mean: e.mean,
    low_quantile: null,
    high_quantile: null,
    histogram: null,
  };
}

interface ListProps {
  page: Page;
  run: Run;
  step: number;
  isEval: boolean;
  range: [number, number] | undefined;
}

function GroupList(props: ListProps) {
  const [pages, setPages] = useState(1);
  const move = (by: number) => {
    const cards = [...document.querySelectorAll<HTMLElement>(".group")];
    const at = cards.findIndex((c) => c.contains(document.activeElement));
    const next = cards[Math.max(0, Math.min(cards.length - 1, at + by))];
    next?.focus();
    next?.scrollIntoView({ block: "start" });
  };
  useKeys({ j: () => move(1), k: () => move(-1) });
  return (
    <>
      {Array.from({ length: pages }, (_, i) => (
        <GroupPage
          key={i}
          {...props}
          offset={i * MANY}
          more={i === pages - 1 ? () => setPages(pages + 1) : undefined}
        />
      ))}
    </>
  );
}

interface PageProps extends ListProps {
  offset: number;
  /** Shows the groups after these; only the last page has it. */
  more: (() => void) | undefined;
}

/** Some of the groups: the server gives no more than a hundred at once, and a step may have many more. */
function GroupPage({ page, run, step, isEval, range, offset, more }: PageProps) {
  // While the slider is being moved, only where it comes to rest is asked for. Another run, and what is held out, has
  // other steps: there the one that was shown before need not exist.
  const place = `${run.id} ${isEval}`;
  const [rested, restedPlace] = [useSettled(step, 80), useSettled(place, 80)];
  const settled = restedPlace === place ? rested : step;
  const sort = page.route.params.get("sort") ?? "group";
  const where = { step: settled, eval: isEval ? 1 : 0, sort, offset, limit: MANY };
  const answer = useApi<Groups>(query(runPath(run.id, "groups"), where), run.revision);
  return (
    <Loaded
      answer={answer}
      show={({ total, groups }) => (
        <div class="groups" aria-busy={answer.loading}>
          {!total && <Empty title={`Step ${settled} has no groups.`} />}
          {groups.map((g) => (
            <GroupCard key={`${g.group} ${g.uid}`} page={page} group={g} range={range} />
          ))}
          {more && offset + groups.length < total && (
            <button type="button" class="more-button" onClick={more}>
              {plural(total - offset - groups.length, "more group")}
            </button>
          )}
        </div>
      )}
    />
  );
}

/** A critic's advantages differ where rewards are equal; a group that was dropped has none. */
function teachesNothing({ rows, std }: Group): boolean {
  if (rows.some((row) => row.eval)) return false; // held out: nothing is to be learned from it
  const known = rows.filter((row) => row.advantage !== null);
  return known.length ? known.every((row) => row.advantage === 0) : std === 0 && rows.length > 1;
}

function GroupCard({ page, group, range }: { page: Page; group: Group; range: [number, number] | undefined }) {
  const right = gold(group.gold);
  return (
    <section class="group" tabIndex={-1} aria-label={`Group ${group.group}`}>
      <header>
        <div class="group-facts">
          <b>Group {group.group}</b>
          {group.rows.length > 1 && group.mean !== null && (
            <>
              <span>
                mean <b>{number(group.mean)}</b>
              </span>
              <span>
                spread <b>{number(group.std)}</b>
              </span>
            </>
          )}
          {right !== null && (
            <span class="gold">
              gold <Text text={excerpt(right, "", 120)} />
            </span>
          )}
          {teachesNothing(group) && (
            <span class="tag" title="All advantages are 0: the objective learns nothing from this group's rewards">
              no signal
            </span>
          )}
          <a href={promptLink(page, group)}>Through time</a>
        </div>
        <Prompt text={group.prompt} />
      </header>
      <div
        class="cards"
        tabIndex={0}
        role="group"
        aria-label={`${plural(group.rows.length, "completion")} of group ${group.group}`}
      >
        {group.rows.map((row) => (
          <Card key={row.sample} page={page} row={row} range={range} />
        ))}
      </div>
    </section>
  );
}
