import { useEffect, useRef, useState } from "preact/hooks";
import { AGAIN_MS, get, NoAnswer } from "./api";

export interface Answer<T> {
  data: T | undefined;
  error: string | undefined;
  loading: boolean;
}

const KEPT = 60;
const answers = new Map<string, unknown>();

function keep(key: string, data: unknown): void {
  answers.delete(key);
  answers.set(key, data);
  const oldest = answers.keys().next();
  if (answers.size > KEPT && !oldest.done) answers.delete(oldest.value);
}

const WAITING: Answer<never> = { data: undefined, error: undefined, loading: true };
const NOTHING: Answer<never> = { data: undefined, error: undefined, loading: false };

/** The requests of one address: one at a time. */
interface Asking {
  abort: AbortController;
  busy: boolean;
  /** What was asked for last. */
  key: string;
}

/**
 * Asks for `url` (null: nothing) and again when `revision` changes. While a newer revision of the same url loads, the
 * older data stays, so that a live page does not flicker. An answer on the way is heard to its end first: of a run that
 * changes faster than its server answers, nothing would ever be shown.
 */
export function useApi<T>(url: string | null, revision = ""): Answer<T> {
  const key = `${url}\n${revision}`;
  const [state, setState] = useState<{ url: string | null; answer: Answer<T> }>({ url: null, answer: NOTHING });
  const [heard, setHeard] = useState(0);
  const asking = useRef<Asking | null>(null);
  useEffect(() => {
    const mine: Asking = { abort: new AbortController(), busy: false, key: "" };
    asking.current = mine;
    return () => mine.abort.abort();
  }, [url]);
  useEffect(() => {
    const mine = asking.current;
    if (url === null || !mine || mine.busy || mine.key === key) return;
    mine.key = key;
    const known = answers.get(key) as T | undefined;
    if (known !== undefined) {
      setState({ url, answer: { data: known, error: undefined, loading: false } });
      return;
    }
    mine.busy = true;
    const { signal } = mine.abort;
    setState((old) => ({ url, answer: { ...(old.url === url ? old.answer : WAITING), loading: true } }));
    get<T>(url, signal)
      .then((data) => {
        if (signal.aborted) return;
        keep(key, data);
        setState({ url, answer: { data, error: undefined, loading: false } });
      })
      .catch((error: unknown) => {
        if (signal.aborted) return;
        const message = error instanceof Error ? error.message : String(error);
        setState((old) => ({
          url,
          answer: { data: old.url === url ? old.answer.data : undefined, error: message, loading: false },
        }));
        if (!(error instanceof NoAnswer)) return;
        setTimeout(() => {
          if (signal.aborted) return;
          mine.key = "";
          setHeard((n) => n + 1);
        }, AGAIN_MS);
      })
      .finally(() => {
        mine.busy = false;
        if (!signal.aborted) setHeard((n) => n + 1);
      });
  }, [url, key, heard]);
  if (url === null) return NOTHING;
  if (state.url === url) return state.answer;
  const known = answers.get(key) as T | undefined;
  return known === undefined ? WAITING : { data: known, error: undefined, loading: false };
}

export type Keys = Record<string, (event: KeyboardEvent) => void>;

/** Keys that work anywhere on the page but in a field that takes text. */
export function useKeys(keys: Keys): void {
  const current = useRef(keys);
  current.current = keys;
  useEffect(() => {
    const listen = (event: KeyboardEvent) => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
      const action = current.current[event.key];
      if (!action || takesText(event.target, event.key)) return;
      event.preventDefault();
      action(event);
    };
    addEventListener("keydown", listen);
    return () => removeEventListener("keydown", listen);
  }, []);
}

function takesText(target: EventTarget | null, key: string): boolean {
  if (!(target instanceof HTMLElement)) return false;
  if (target.closest("dialog[open]")) return true;
  // What is wider than its place is scrolled by these keys while it has the focus.
  const scrolls = target.getAttribute("tabindex") === "0" && target.scrollWidth > target.clientWidth;
  if (scrolls && ["ArrowLeft", "ArrowRight"].includes(key)) return true;
  if (target instanceof HTMLInputElement && ["checkbox", "radio", "button"].includes(target.type)) return false;
  if (target instanceof HTMLInputElement && target.type === "range") return key.startsWith("Arrow");
  return (
    target instanceof HTMLInputElement || target instanceof HTMLTextAreaElement || target instanceof HTMLSelectElement
  );
}

/** The width of an element, followed as it changes. */
export function useWidth<E extends HTMLElement>(): [{ current: E | null }, number] {
  const ref = useRef<E>(null);
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const element = ref.current;
    if (!element) return;
    const observer = new ResizeObserver(() => setWidth(Math.floor(element.clientWidth)));
    observer.observe(element);
    setWidth(Math.floor(element.clientWidth));
    return () => observer.disconnect();
  }, []);
  return [ref, width];
}

/** Whether an element has been near the visible part of the page yet: charts far below are drawn when needed. */
export function useSeen<E extends HTMLElement>(): [{ current: E | null }, boolean] {
  const ref = useRef<E>(null);
  const [seen, setSeen] = useState(false);
  useEffect(() => {
    const element = ref.current;
    if (!element || seen) return;
    const observer = new IntersectionObserver((entries) => entries.some((e) => e.isIntersecting) && setSeen(true), {
      rootMargin: "400px",
    });
    observer.observe(element);
    return () => observer.disconnect();
  }, [seen]);
  return [ref, seen];
}

/** A value that follows `value` once it has been still for `ms`. */
export function useSettled<T>(value: T, ms: number): T {
  const [settled, setSettled] = useState(value);
  useEffect(() => {
    const timer = setTimeout(() => setSettled(value), ms);
    return () => clearTimeout(timer);
  }, [value, ms]);
  return settled;
}

/** Draws again every `ms`: for what grows old while nothing else changes. */
export function useClock(ms: number): void {
  const [, setCount] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => setCount((n) => n + 1), ms);
    return () => clearInterval(timer);
  }, [ms]);
}

/** Counts up when the colours change: the canvas charts are drawn again then. */
export function useScheme(): number {
  const [count, setCount] = useState(0);
  useEffect(() => {
    const change = () => setCount((n) => n + 1);
    const media = matchMedia("(prefers-color-scheme: dark)");
    media.addEventListener("change", change);
    addEventListener("trew-theme", change);
    return () => {
      media.removeEventListener("change", change);
      removeEventListener("trew-theme", change);
    };
  }, []);
  return count;
}
