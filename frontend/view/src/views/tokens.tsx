import { useCallback, useMemo } from "preact/hooks";
import { query, runPath } from "../api";
import { scaleOf, type Scale } from "../colour";
import { adjust, type Page } from "../context";
import { plain } from "../format";
import { useApi } from "../hooks";
import { Answer, Facts, Parts, Prompt, RowScore } from "../parts/answer";
import { Empty, Loaded } from "../parts/basics";
import { rangeOf } from "../parts/steps";
import { Navigation, tableOf, type Place } from "../parts/token_nav";
import { TokenHistogram, TokenPlot } from "../parts/token_plot";
import { Inspector, Legend, PushSummary, Strongest } from "../parts/token_side";
import { hasTexts, TokenText } from "../parts/token_text";
import { Text } from "../parts/text";
import { useToken } from "../parts/use_token";
import { firstValue, pushes, valueNames } from "../push";
import { whole } from "../route";
import type { About, Completion, Groups, Message, Num, Run, Steps } from "../types";
import { NO_ROLLOUTS } from "./rollouts";

export function Tokens({ page }: { page: Page }) {
  const run = page.main;
  const steps = useApi<Steps>(run ? runPath(run.id, "steps") : null, run?.revision);
  if (!run) return <Empty title="No run is chosen.">Choose one in the list of runs.</Empty>;
  return (
    <Loaded
      answer={steps}
      show={(data) => {
        const params = page.route.params;
        const isEval = params.has("eval") || !data.steps.length;
        const known = isEval ? data.evals : data.steps;
        const step = whole(params, "step") ?? known.at(-1)?.step;
        if (step === undefined) return <Empty title="No rollouts yet.">{NO_ROLLOUTS}</Empty>;
        return <AtStep page={page} run={run} steps={data} step={step} isEval={isEval} />;
      }}
    />
  );
}

/** Without a group in the address, the first one of the step is meant. */
function AtStep({
  page,
  run,
  steps,
  step,
  isEval,
}: {
  page: Page;
  run: Run;
  steps: Steps;
  step: number;
  isEval: boolean;
}) {
  const group = whole(page.route.params, "group");
  const url = query(runPath(run.id, "groups"), { step, eval: isEval ? 1 : 0, offset: 0, limit: 1 });
  const first = useApi<Groups>(group === undefined ? url : null, run.revision);
  if (group !== undefined) {
    const place = { step, eval: isEval, group, sample: whole(page.route.params, "sample") ?? 0 };
    return <One page={page} run={run} steps={steps} place={place} />;
  }
  return (
    <Loaded
      answer={first}
      show={({ groups }) => {
        const row = groups[0]?.rows[0];
        if (!row) return <Empty title={`Step ${step} has no completions.`} />;
        return (
          <One
            page={page}
            run={run}
            steps={steps}
            place={{ step, eval: isEval, group: row.group, sample: row.sample }}
          />
        );
      }}
    />
  );
}

function One({ page, run, steps, place }: { page: Page; run: Run; steps: Steps; place: Place }) {
  const url = query(runPath(run.id, "completion"), { ...place, eval: place.eval ? 1 : 0 });
  const answer = useApi<Completion>(url, tableOf(run, steps, place));
  return (
    <>
      <Navigation page={page} run={run} steps={steps} place={place} row={answer.data?.row} />
      <Loaded
        answer={answer}
        show={(data) => <Shown key={url} page={page} completion={data} range={rangeOf(steps.steps)} />}
      />
    </>
  );
}

/** The value that colours the tokens: the one in the address, or the first that says something. */
interface Chosen {
  names: string[];
  name: string | undefined;
  values: readonly Num[];
  about: About;
  scale: Scale;
  choose: (name: string) => void;
}

const NO_VALUES: readonly Num[] = [];

function useChosen(page: Page, completion: Completion): Chosen {
  const names = useMemo(() => valueNames(completion), [completion]);
  const asked = page.route.params.get("value") ?? "";
  const name = names.includes(asked) ? asked : firstValue(completion, names);
  const values = (name && completion.values[name]) || NO_VALUES;
  const about: About = (name && completion.about[name]) || { title: name ?? "", help: "", diverging: false };
  const { diverging, middle } = about;
  const scale = useMemo(
    () => scaleOf(name ?? "", middle === undefined ? { diverging } : { diverging, middle }, values),
    [name, diverging, middle, values],
  );
  const choose = useCallback((value: string) => adjust(page, { value }), [page]);
  return { names, name, values, about, scale, choose };
}

function Shown({
  page,
  completion,
  range,
}: {
  page: Page;
  completion: Completion;
  range: [number, number] | undefined;
}) {
  const push = useMemo(() => pushes(completion), [completion]);
  const chosen = useChosen(page, completion);
  const { names, name, values, about, scale, choose } = chosen;
  const spaces = page.route.params.get("spaces") !== "0";
  const { at, pinned, hover, pin, area } = useToken(page, completion.tokens.length);
  // Thousands of boxes: they are made again only when what they show changes, not with every move of the pointer.
  const text = useMemo(
    () => <TokenText completion={completion} values={values} scale={scale} push={push} spaces={spaces} />,
    [completion, values, scale, push, spaces],
  );
  return (
    <div class="token-view">
      <TokenHead completion={completion} range={range} />
      <section class="token-main">
        {(names.includes("advantage") || names.includes("coefficient")) && (
          <PushSummary completion={completion} push={push} />
        )}
        <ColourBy page={page} completion={completion} chosen={chosen} spaces={spaces} />
        {name !== undefined && (
          <div class="token-plots">
            <TokenPlot
              completion={completion}
              title={about.title}
              values={values}
              scale={scale}
              at={at}
              onHover={hover}
              onPick={pin}
            />
            <TokenHistogram title={about.title} values={values} scale={scale} />
          </div>
        )}
        <div
          ref={area}
          class="token-area"
          tabIndex={0}
          role="application"
          aria-label="Tokens of the completion: arrow keys walk through them, and the values of each are read out"
        >
          <Recorded completion={completion} />
          {text}
          {!completion.tokens.length && <p class="muted">The completion is empty.</p>}
        </div>
      </section>
      {name !== undefined && (
        <aside class="token-side" aria-label="Values of tokens">
          <Legend title={about.title} help={about.help} scale={scale} values={values} />
          <Inspector
            completion={completion}
            push={push}
            names={names}
            shown={name}
            at={at}
            pinned={pinned !== null}
            onValue={choose}
            onClose={() => pin(null)}
          />
          <Strongest completion={completion} values={values} scale={scale} onPick={pin} />
        </aside>
      )}
    </div>
  );
}

/** Where the tokens cannot show the text as it was recorded, the text itself. Of an episode, each turn has its own. */
function Recorded({ completion }: { completion: Completion }) {
  const { pieces, row, turns } = completion;
  const several = (turns?.length ?? 0) > 1;
  if (!pieces?.why || (several && hasTexts(completion))) return null;
  return (
    <>
      {!several && <Text text={row.completion} class="recorded" />}
      <p class="note">Tokens below: {pieces.why}.</p>
    </>
  );
}

function TokenHead({ completion, range }: { completion: Completion; range: [number, number] | undefined }) {
  const { row } = completion;
  return (
    <section class="token-head">
      <div class="group-facts">
        <RowScore row={row} range={range} />
        <Facts row={row} />
      </div>
      <Parts row={row} />
      <Answer row={row} />
      {row.rollout_error && <p class="failure">{row.rollout_error}</p>}
      <Messages completion={completion} />
    </section>
  );
}

function ColourBy({
  page,
  completion,
  chosen,
  spaces,
}: {
  page: Page;
  completion: Completion;
  chosen: Chosen;
  spaces: boolean;
}) {
  const { names, name, choose } = chosen;
  return (
    <div class="controls">
      {names.length ? (
        <div class="segmented" role="group" aria-label="Colour tokens by">
          {names.map((each) => (
            <button
              key={each}
              type="button"
              aria-pressed={each === name}
              title={completion.about[each]?.help}
              onClick={() => choose(each)}
            >
              {completion.about[each]?.title ?? each}
            </button>
          ))}
        </div>
      ) : (
        <p class="note">This run recorded no values for the tokens of this completion.</p>
      )}
      <label class="check">
        <input
          type="checkbox"
          checked={spaces}
          onChange={(e) => adjust(page, { spaces: e.currentTarget.checked ? null : "0" })}
        />{" "}
        show spaces
      </label>
    </div>
  );
}

const MANY_MESSAGES = 4;

/** The prompt as the model's first turn found it. Of an episode, what came later is among the turns. */
function Messages({ completion }: { completion: Completion }) {
  const { messages, row, turns } = completion;
  const first = turns?.[0];
  const opening = first?.role === "environment" && first.end === 0 ? first.messages : undefined;
  const shown = opening ?? messages;
  if (!shown) return <Prompt text={row.prompt} />;
  if (shown.length <= MANY_MESSAGES) return <MessageList messages={shown} />;
  return (
    <details>
      <summary>{shown.length} messages before the completion</summary>
      <MessageList messages={shown} />
    </details>
  );
}

function MessageList({ messages }: { messages: Message[] }) {
  return (
    <ol class="messages" aria-label="Messages of the prompt">
      {messages.map((message, i) => (
        <li key={i}>
          <span class="role">{message.role}</span>
          <div>
            {typeof message.content === "string" ? (
              <Prompt text={message.content} />
            ) : (
              <Text text={plain(message.content)} />
            )}
          </div>
        </li>
      ))}
    </ol>
  );
}
