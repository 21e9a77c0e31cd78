/** One completion as a card: score by part, extracted answer beside the gold, why it ended, and what it says. */

import { link, type Page } from "../context";
import { number, plain, signed } from "../format";
import { clip, excerpt, Text } from "./text";
import { Score } from "./basics";
import type { Row, Said } from "../types";

/** What each status of a reward means (docs/rewards.md). */
export const STATUSES: Record<string, string> = {
  scored: "judged",
  no_answer: "no answer was found in the completion",
  bad_gold: "the data row's answer cannot be used, so nothing was judged",
  timeout: "judging took too long, so nothing was judged",
  sandbox_error: "the sandbox failed, so nothing was judged",
  environment_error: "the environment failed, so nothing was judged",
  not_applicable: "this reward does not apply to this prompt",
  other_set: "this reward judges the rows of other data sets",
};
/** Those of a reward of which nothing was expected: no sign of trouble. */
const USUAL: readonly string[] = ["not_applicable", "other_set"];

const SHOWN = 700;

export function tokensLink(page: Page, row: Row): string {
  return link(page, "tokens", { step: row.step, eval: row.eval ? 1 : null, group: row.group, sample: row.sample });
}

/** Leads to one prompt through time: by its text too, since another prompt may have its uid. */
export function promptLink(page: Page, { uid, prompt_hash }: Pick<Row, "uid" | "prompt_hash">): string {
  return link(page, "prompts", { uid, prompt_hash });
}

export function gold(value: unknown): string | null {
  if (value === null || value === undefined) return null;
  if (typeof value === "object" && !Array.isArray(value)) {
    const entries = Object.entries(value as Record<string, unknown>);
    return entries.length === 1 ? plain(entries[0]?.[1]) : entries.map(([k, v]) => `${k}: ${plain(v)}`).join("\n");
  }
  return plain(value);
}

type Range = [number, number] | undefined;

/** The score of a completion; of an answer from the data which one it is, since no reward judged it. */
export function RowScore({ row, range, alone = "" }: { row: Row; range: Range; alone?: string }) {
  if (row.given === undefined) return <Score value={row.score} {...(range ? { low: range[0], high: range[1] } : {})} />;
  const name = row.given === "demonstration" ? alone : row.given;
  return name ? <span class="tag">{name}</span> : null;
}

/** Extracted answer and gold next to each other; a difference to the letter is named, since a score may hang on it. */
export function Answer({ row }: { row: Row }) {
  const right = gold(row.gold);
  // What an environment begins an episode with is no answer that a reply could have.
  if (row.extracted === null && (right === null || row.said)) return null;
  return (
    <dl class="answer">
      <dt>extracted</dt>
      <dd>
        {row.extracted === null ? (
          <span class="muted">none found</span>
        ) : (
          <Text text={excerpt(row.extracted, "", 300)} />
        )}
      </dd>
      {right !== null && (
        <>
          <dt>gold</dt>
          <dd>
            <Text text={excerpt(right, "", 300)} />
          </dd>
        </>
      )}
    </dl>
  );
}

export function Parts({ row }: { row: Row }) {
  const names = [...new Set([...Object.keys(row.parts), ...Object.keys(row.statuses)])];
  if (!names.length || (names.length === 1 && row.statuses[names[0] ?? ""] === row.status && row.status === "scored"))
    return null;
  return (
    <ul class="parts" aria-label="Score by part">
      {names.map((name) => {
        const status = row.statuses[name] ?? "scored";
        return (
          <li key={name} title={STATUSES[status] ?? status}>
            <span class="part-name">{name}</span> <b>{number(row.parts[name])}</b>
            {status !== "scored" && <span class={`tag ${USUAL.includes(status) ? "" : "warn"}`}>{status}</span>}
          </li>
        );
      })}
    </ul>
  );
}

/** Why the completion ended, its length, its advantage and anything unusual. */
export function Facts({ row }: { row: Row }) {
  return (
    <div class="facts">
      {troubles(row).map(([name, help, tone]) => (
        <span key={name} class={`tag ${tone}`} title={help}>
          {name}
        </span>
      ))}
      {row.advantage !== null && (
        <span
          class={`tag advantage ${direction(row.advantage)}`}
          title="Mean advantage: above 0 the completion is made more likely"
        >
          A {signed(row.advantage)}
        </span>
      )}
      <span class="muted">
        {row.length.toLocaleString("en-US")} tokens{row.turns > 1 ? ` in ${row.turns} turns` : ""}
        {row.ending ? ` · ${row.ending}` : ""}
        {row.finish_reason && !row.truncated ? ` · ${row.finish_reason}` : ""}
      </span>
    </div>
  );
}

function direction(value: number): string {
  return value > 0 ? "up" : value < 0 ? "down" : "";
}

function troubles(row: Row): [name: string, help: string, tone: string][] {
  const all: [string, string, string][] = [];
  if (row.status !== "scored") all.push([row.status, STATUSES[row.status] ?? "", "warn"]);
  if (row.truncated) all.push(["truncated", "It reached max_tokens before its end", "warn"]);
  if (row.rollout_status === "failed") all.push(["failed", row.rollout_error ?? "", "bad"]);
  if (!row.eval && row.trained_group === null) {
    all.push([
      "not trained on",
      "Its group was dropped before training, as dynamic sampling does with groups without signal",
      "",
    ]);
  }
  return all;
}

/** A completion in words. */
export function nameOf(row: Row): string {
  return `Sample ${row.sample}, ${row.given === undefined ? `score ${number(row.score)}` : row.given}`;
}

export function Card({ page, row, range }: { page: Page; row: Row; range?: Range }) {
  const text = clip(row.completion, 0, SHOWN);
  const cut = row.cut || row.completion.length > SHOWN;
  return (
    <article class="card" aria-label={nameOf(row)}>
      <header>
        <RowScore row={row} range={range} />
        <span class="muted">#{row.sample}</span>
        <a class="card-open" href={tokensLink(page, row)}>
          Tokens
        </a>
      </header>
      <Facts row={row} />
      <Parts row={row} />
      {row.rollout_error && <p class="failure">{row.rollout_error}</p>}
      <Answer row={row} />
      {row.said ? (
        <Conversation said={row.said} />
      ) : (
        <div class="said">
          <Text text={text} />
          {cut && (
            <a class="more" href={tokensLink(page, row)}>
              … all of it
            </a>
          )}
        </div>
      )}
    </article>
  );
}

/** Who said what in an episode, with the calls and the reward of each reply. What the environment said is set apart. */
function Conversation({ said }: { said: Said[] }) {
  return (
    <ol class="said conversation" tabIndex={0} aria-label="Conversation">
      {said.map(({ who, text, facts }, i) => (
        <li key={i} class={who === "policy" ? "by-policy" : "by-other"}>
          <span class="who">{who === "policy" ? "model" : who}</span>
          {(text !== "" || !facts.some(([name]) => name === "call")) && <Text text={text} />}
          {facts.length > 0 && (
            <ul class="said-facts">
              {facts.map(([name, value], k) => (
                <li key={k} class={name === "call" ? "" : "tag"}>
                  {name === "call" ? (
                    <code>
                      <Text text={value} />
                    </code>
                  ) : (
                    <>
                      {name.replaceAll("_", " ")} <Text text={value} />
                    </>
                  )}
                </li>
              ))}
            </ul>
          )}
        </li>
      ))}
    </ol>
  );
}

export function Prompt({ text, open = false }: { text: string; open?: boolean }) {
  const long = text.length > 260 || text.split("\n").length > 4;
  if (!long || open) return <Text text={text} class="prompt" />;
  return (
    <details class="prompt-fold">
      <summary>
        <Text text={excerpt(text.trim(), "", 220)} class="prompt" />
      </summary>
      <Text text={text} class="prompt" />
    </details>
  );
}
