/** Small parts that every view uses. */

import type { ComponentChildren } from "preact";
import type { Answer } from "../hooks";
import type { Num, Run, Summary } from "../types";
import { tint } from "../colour";
import { number, percent } from "../format";

/** Nothing to show, with the reason and what to do. */
export function Empty({ title, children }: { title: string; children?: ComponentChildren }) {
  return (
    <div class="empty" role="status">
      <b>{title}</b>
      {children && <p>{children}</p>}
    </div>
  );
}

export function Failure({ message }: { message: string }) {
  return (
    <p class="failure" role="alert">
      {message}
    </p>
  );
}

/** What `show` makes of an answer; before that what is known about why there is none. */
export function Loaded<T>({ answer, show }: { answer: Answer<T>; show: (data: T) => ComponentChildren }) {
  return (
    <>
      {answer.error && <Failure message={answer.error} />}
      {answer.data !== undefined ? show(answer.data) : answer.loading && <p class="loading">Loading …</p>}
    </>
  );
}

export function Segmented<T extends string>(props: {
  label: string;
  value: T;
  options: readonly (readonly [T, string] | readonly [T, string, string])[];
  onChange: (value: T) => void;
}) {
  return (
    <div class="segmented" role="group" aria-label={props.label}>
      {props.options.map(([value, title, help]) => (
        <button
          key={value}
          type="button"
          title={help}
          aria-pressed={value === props.value}
          onClick={() => props.onChange(value)}
        >
          {title}
        </button>
      ))}
    </div>
  );
}

export function Select<T extends string>(props: {
  label: string;
  value: T;
  options: readonly (readonly [T, string])[];
  onChange: (value: T) => void;
}) {
  return (
    <label class="field">
      <span>{props.label}</span>
      <select value={props.value} onChange={(e) => props.onChange(e.currentTarget.value as T)}>
        {props.options.map(([value, title]) => (
          <option key={value} value={value}>
            {title}
          </option>
        ))}
      </select>
    </label>
  );
}

interface FieldProps {
  label: string;
  value: string;
  onInput: (value: string) => void;
  number?: boolean;
  placeholder?: string;
  /** The field that / leads to. */
  search?: boolean;
}

export function Field({ label, value, onInput, number: isNumber, placeholder, search }: FieldProps) {
  const common = {
    value,
    placeholder,
    "data-search": search ? "" : undefined,
    autocomplete: "off" as const,
    spellcheck: false,
    onInput: (e: { currentTarget: HTMLInputElement }) => onInput(e.currentTarget.value),
  };
  return (
    <label class="field">
      <span>{label}</span>
      {isNumber ? <input type="number" step="any" {...common} /> : <input type="text" {...common} />}
    </label>
  );
}

export function State({ run }: { run: Run }) {
  return <span class={`state ${run.state}`}>{run.state}</span>;
}

/** An accuracy with its 95 % interval, as text. */
export function interval(a: { accuracy: Num; low: Num; high: Num } | null | undefined): string {
  if (!a || a.accuracy === null) return "–";
  return `${percent(a.accuracy)} (${percent(a.low).replace(" %", "")} to ${percent(a.high)})`;
}

/** What was held out, before or after: an accuracy, or the loss of demonstrations. */
export function heldOut(data: Summary | undefined, when: "before" | "after"): string {
  const loss = when === "before" ? data?.loss_before : data?.loss_after;
  return loss ? `loss ${span(loss)}` : interval(data?.[when]);
}

function span(a: { loss: Num; low: Num; high: Num }): string {
  if (a.low === null || a.high === null) return number(a.loss);
  return `${number(a.loss)} (${number(a.low)} to ${number(a.high)})`;
}

/** A score with a colour from 0 (orange) to 1 (blue); not judged is neither. */
export function Score({ value, low = 0, high = 1 }: { value: Num; low?: number; high?: number }) {
  if (value === null) return <span class="score none">no score</span>;
  const at = high > low ? (value - low) / (high - low) : 0.5;
  const strength = 0.25 + 0.75 * Math.min(1, Math.abs(at - 0.5) * 2);
  return (
    <span class="score" style={{ background: tint(at >= 0.5 ? "blue" : "orange", strength) }}>
      {number(value)}
    </span>
  );
}
