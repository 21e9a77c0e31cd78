/** Beside the tokens: the legend of the colours, everything about one token, and the strongest ones. */

import type { ComponentChildren } from "preact";
import { background, type Scale } from "../colour";
import { number, percent, plural, short, signed } from "../format";
import { PUSH_TITLES, strongest, tally, type Push } from "../push";
import type { Completion, Num, Token } from "../types";
import { visible } from "./text";

export function Legend({
  title,
  help,
  scale,
  values,
}: {
  title: string;
  help: string;
  scale: Scale;
  values: readonly Num[];
}) {
  const ends = endsOf(scale);
  const stops = Array.from({ length: 21 }, (_, i) => ends.low + ((ends.high - ends.low) * i) / 20);
  const beyond = values.filter((v) => v !== null && outside(v, scale)).length;
  const end = (at: number) => {
    const value = scale.log ? Math.exp(at) : at;
    return short(value, Math.abs(value - scale.centre));
  };
  return (
    <div class="legend-box">
      <p>
        <b>{title}</b> <span class="muted">{help}</span>
      </p>
      {scale.reach === 0 ? (
        <p class="muted">The same for every token: {number(values.find((v) => v !== null))}.</p>
      ) : (
        <>
          <div class="ramp" aria-hidden="true">
            {stops.map((stop, i) => (
              <span key={i} style={{ background: background(scale.log ? Math.exp(stop) : stop, scale) }} />
            ))}
          </div>
          <div class="bar-ends">
            <span>{end(ends.low)}</span>
            {scale.kind === "diverging" && <span>{number(scale.centre)}</span>}
            <span>{end(ends.high)}</span>
          </div>
        </>
      )}
      {beyond > 0 && <p class="muted small">Beyond the ends, in the same colour: {plural(beyond, "token")}.</p>}
    </div>
  );
}

function endsOf(scale: Scale): { low: number; high: number } {
  const middle = scale.log ? Math.log(scale.centre) : scale.centre;
  const reach = Math.abs(scale.reach);
  if (scale.kind === "diverging") return { low: middle - reach, high: middle + reach };
  return scale.reach < 0 ? { low: middle - reach, high: middle } : { low: middle, high: middle + reach };
}

function outside(value: number, scale: Scale): boolean {
  const distance = scale.log
    ? Math.abs(Math.log(Math.max(value, 1e-12) / scale.centre))
    : Math.abs(value - scale.centre);
  return distance > Math.abs(scale.reach) * (1 + 1e-9);
}

/** How many tokens were pushed up, pushed down and held, as one bar and in words. */
export function PushSummary({ completion, push }: { completion: Completion; push: readonly Push[] }) {
  const found = tally(completion, push);
  const total = push.length || 1;
  const known = !!completion.values["coefficient"];
  return (
    <div class="push-summary">
      <div
        class="push-bar"
        role="img"
        aria-label={found.map((t) => `${t.count} ${PUSH_TITLES[t.push].title}`).join(", ")}
      >
        {found.map((t) => (
          <span
            key={t.push}
            class={`push-part ${t.push}`}
            style={{ flexGrow: String(t.count / total) }}
            title={`${t.count} ${PUSH_TITLES[t.push].title}`}
          />
        ))}
      </div>
      <ul class="push-words">
        {found.map((t) => (
          <li key={t.push} title={PUSH_TITLES[t.push].help}>
            <span class={`push-part key ${t.push}`} /> <b>{t.count.toLocaleString("en-US")}</b>{" "}
            {PUSH_TITLES[t.push].title}
            {t.share !== null && t.share > 0 && (
              <span class="muted">
                {" "}
                · {percent(t.share)} of the push{t.push === "held" ? ", by the KL term" : ""}
              </span>
            )}
          </li>
        ))}
      </ul>
      {!known && (
        <p class="muted small">
          By the sign of the advantage: this run recorded no coefficients, so which tokens were held is not known.
        </p>
      )}
    </div>
  );
}

interface InspectorProps {
  completion: Completion;
  push: readonly Push[];
  names: readonly string[];
  shown: string | undefined;
  at: number | null;
  pinned: boolean;
  onValue: (name: string) => void;
  onClose: () => void;
}

/** Every value of one token. It is read out when the token changes. */
export function Inspector({ completion, push, names, shown, at, pinned, onValue, onClose }: InspectorProps) {
  const token = at === null ? undefined : completion.tokens[at];
  if (at === null || !token) {
    return (
      <div class="inspector empty-inspector">
        <p class="muted">Point at a token, tap it, or walk through them with the arrow keys, to see its values.</p>
      </div>
    );
  }
  const kind = push[at] ?? "unused";
  return (
    <div class={`inspector ${pinned ? "pinned" : ""}`} role="status" aria-live="polite">
      <header>
        <code class="inspected">{tokenText(token)}</code>
        {pinned && (
          <button type="button" class="icon" aria-label="Close" title="Close (Esc)" onClick={onClose}>
            ✕
          </button>
        )}
      </header>
      <p>
        <span class={`push-part key ${kind}`} /> <b>{PUSH_TITLES[kind].title}</b>{" "}
        <span class="muted">
          token {at.toLocaleString("en-US")}, id {token.id}
          {versionOf(completion, at)}
        </span>
      </p>
      <table class="values">
        <tbody>
          {names.map((name) => (
            <tr key={name} class={name === shown ? "shown" : ""}>
              <th scope="row">
                <button
                  type="button"
                  class="as-text"
                  title={completion.about[name]?.help}
                  onClick={() => onValue(name)}
                >
                  {completion.about[name]?.title ?? name}
                </button>
              </th>
              <td>{valueText(name, completion.values[name]?.[at])}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function tokenText({ text, id }: Token): ComponentChildren {
  if (text === null) return `⟨${id}⟩`;
  return text === "" ? "(part of a character)" : visible(text, true);
}

function versionOf(completion: Completion, at: number): string {
  const versions = completion.versions ?? [];
  const found = versions.find((v) => v.start <= at && at < v.end);
  return found ? `, sampled by weights ${found.version}` : "";
}

function valueText(name: string, value: Num | undefined): string {
  if (value === null || value === undefined) return "–";
  const p = Math.exp(value);
  if (name.endsWith("logprob")) return `${number(value)} (p ${short(p, 1 - p)})`;
  return ["coefficient", "advantage"].includes(name) || name.endsWith("gap") ? signed(value) : number(value);
}

const NO_TOKEN: Token = { text: "", id: 0, sampled: false };

/** The tokens with the most extreme values of the chosen kind; each leads to its place. */
export function Strongest(props: {
  completion: Completion;
  values: readonly Num[];
  scale: Scale;
  onPick: (i: number) => void;
}) {
  const { completion, values, scale, onPick } = props;
  const { high, low } = strongest(values, scale.centre, 6);
  if (scale.reach === 0) return null;
  return (
    <div class="strongest">
      {[
        ["Largest", high],
        ["Smallest", scale.kind === "diverging" || scale.reach < 0 ? low : []],
      ].map(([title, list]) =>
        (list as number[]).length ? (
          <div key={title as string}>
            <p class="muted">{title as string}</p>
            <ul>
              {(list as number[]).map((i) => (
                <li key={i}>
                  <button
                    type="button"
                    class="strong-token"
                    onClick={() => onPick(i)}
                    style={{ background: background(values[i], scale) }}
                  >
                    <code>{tokenText(completion.tokens[i] ?? NO_TOKEN)}</code>
                    <span>{number(values[i])}</span>
                  </button>
                </li>
              ))}
            </ul>
          </div>
        ) : null,
      )}
    </div>
  );
}
