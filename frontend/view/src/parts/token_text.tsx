/** The tokens of a completion as running text, each coloured by its value. */

import type { ComponentChildren } from "preact";
import { background, type Scale } from "../colour";
import { number, plain } from "../format";
import { useSeen } from "../hooks";
import type { Push } from "../push";
import type { Completion, Num, Token, Turn } from "../types";
import { Text, visible } from "./text";

// A browser is quick with some thousand boxes; of longer texts only the pieces near the screen exist.
const FLOWING = 4000;
const PIECE = 1500;

interface Paint {
  completion: Completion;
  values: readonly Num[];
  scale: Scale;
  push: readonly Push[];
  spaces: boolean;
}

/** Whether the tokens have texts: without a tokenizer, or where secrets were masked, only ids are known. */
export function hasTexts({ tokens }: Completion): boolean {
  return tokens[0]?.text !== null;
}

export function TokenText(paint: Paint) {
  const { completion } = paint;
  const turns = completion.turns ?? [];
  if (turns.length < 2 && !turns.some((t) => t.role === "environment")) {
    return <Stretch {...paint} start={0} end={completion.tokens.length} />;
  }
  return (
    <ol class="turns">
      {blocks(turns, completion.tokens.length).map(({ turn, start, end, number: at }) => (
        <li key={start} class={`turn ${turn?.role ?? "environment"}`}>
          <TurnHead turn={turn} at={at} />
          {turn?.text && !hasTexts(completion) ? <Text text={turn.text} class="recorded" /> : null}
          <Stretch {...paint} start={start} end={end} />
          {turn?.tool_calls?.length ? <ToolCalls calls={turn.tool_calls} /> : null}
        </li>
      ))}
    </ol>
  );
}

interface Block {
  turn: Turn | null;
  start: number;
  end: number;
  number: number;
}

/** Every token is in exactly one block: what no turn covers becomes a block of the environment. */
function blocks(turns: readonly Turn[], count: number): Block[] {
  const all: Block[] = [];
  let done = 0;
  let policy = 0;
  for (const turn of [...turns].sort((a, b) => a.start - b.start)) {
    if (turn.start > done) all.push({ turn: null, start: done, end: turn.start, number: policy });
    if (turn.role === "policy") policy += 1;
    all.push({ turn, start: Math.max(done, turn.start), end: turn.end, number: policy });
    done = Math.max(done, turn.end);
  }
  if (done < count) all.push({ turn: null, start: done, end: count, number: policy });
  // What the environment said before the first turn is the prompt, which is shown above.
  return all.filter((b) => b.end > b.start || (b.turn && b.turn.end > 0));
}

function TurnHead({ turn, at }: { turn: Turn | null; at: number }) {
  if (turn?.role !== "policy") {
    return (
      <header class="turn-head">
        <b>Environment</b>
        <span class="muted">the model read this and did not write it</span>
        {turn?.cut && <span class="tag warn">cut to fit</span>}
      </header>
    );
  }
  return (
    <header class="turn-head">
      <b>Turn {at}: model</b>
      {turn.reward !== null && (
        <span>
          reward <b>{number(turn.reward)}</b>
        </span>
      )}
      {turn.finish_reason && turn.finish_reason !== "stop" && <span class="tag warn">{turn.finish_reason}</span>}
      {turn.cut && <span class="tag warn">cut to fit</span>}
      <TurnNotes turn={turn} />
    </header>
  );
}

/** What the environment named and measured about a turn. */
function TurnNotes({ turn }: { turn: Turn }) {
  return (
    <>
      {turn.state && (
        <span class="muted">
          state <Text text={turn.state} />
        </span>
      )}
      {Object.entries(turn.metrics ?? {}).map(([name, value]) => (
        <span key={name} class="muted">
          {name} {number(value)}
        </span>
      ))}
    </>
  );
}

function ToolCalls({ calls }: { calls: unknown[] }) {
  return (
    <ul class="tool-calls" aria-label="Tool calls">
      {calls.map((call, i) => (
        <li key={i}>
          <span class="tag">tool call</span> <Text text={callText(call)} class="code" />
        </li>
      ))}
    </ul>
  );
}

function callText(call: unknown): string {
  const inner = (call as { function?: unknown } | null)?.function ?? call;
  const { name, arguments: given } = (inner ?? {}) as { name?: unknown; arguments?: unknown };
  return typeof name === "string" ? `${name}(${plain(given ?? "")})` : plain(call);
}

function Stretch({ start, end, ...paint }: Paint & { start: number; end: number }) {
  if (end - start <= FLOWING) {
    return (
      <bdi class="tokens" dir="auto">
        {spans(paint, start, end)}
      </bdi>
    );
  }
  const pieces = [];
  for (let from = start; from < end; from += PIECE) {
    pieces.push(<Piece key={from} {...paint} start={from} end={Math.min(end, from + PIECE)} />);
  }
  return <>{pieces}</>;
}

function Piece({ start, end, ...paint }: Paint & { start: number; end: number }) {
  const [ref, seen] = useSeen<HTMLDivElement>();
  const length = paint.completion.tokens.slice(start, end).reduce((sum, t) => sum + (t.text?.length ?? 8), 0);
  return (
    <div
      ref={ref}
      class="piece"
      data-piece={start}
      data-end={end}
      style={seen ? {} : { minHeight: `${Math.ceil(length / 90) * 1.7}em` }}
    >
      <span class="piece-at">token {start.toLocaleString("en-US")}</span>
      {seen && (
        <bdi class="tokens" dir="auto">
          {spans(paint, start, end)}
        </bdi>
      )}
    </div>
  );
}

function spans({ completion, values, scale, push, spaces }: Paint, start: number, end: number): ComponentChildren[] {
  const all: ComponentChildren[] = [];
  for (let i = start; i < end; i += 1) {
    const token = completion.tokens[i];
    if (!token) continue;
    const colour = token.sampled ? background(values[i], scale) : "";
    all.push(
      <span
        key={i}
        id={`t${i}`}
        data-i={i}
        class={`tok ${push[i]}${token.special ? " special" : ""}`}
        style={colour ? { background: colour } : {}}
      >
        {pieceOf(token, spaces)}
      </span>,
    );
  }
  return all;
}

/** A token's text; of a character that several tokens make up, all but the last have none. */
function pieceOf({ text, id, special }: Token, spaces: boolean): ComponentChildren {
  if (text === null) return `⟨${id}⟩ `;
  if (text === "") return <span class="ws">◦</span>;
  return visible(text, spaces && !special);
}
