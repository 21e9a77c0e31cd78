/** Where the reader is: everything is in the part of the address after #, so that every view can be linked to. */

import { useEffect, useState } from "preact/hooks";

export const VIEWS = [
  "runs",
  "curves",
  "rollouts",
  "tokens",
  "prompts",
  "search",
  "health",
  "config",
  "compare",
] as const;
export type View = (typeof VIEWS)[number];

export interface Route {
  view: View;
  params: URLSearchParams;
}

/** `#curves?run=a&run=b&smooth=0.6`; an unknown view is the list of runs. */
export function parse(hash: string): Route {
  const [name = "", search = ""] = hash.replace(/^#/, "").split("?", 2);
  const view = VIEWS.find((each) => each === name) ?? "runs";
  return { view, params: new URLSearchParams(search) };
}

export type Changes = Record<string, string | number | boolean | null | undefined>;

/** The address of a view: `changes` replace parameters of `from`, and null or "" removes one. */
export function href(view: View, from: URLSearchParams, changes: Changes = {}): string {
  const params = new URLSearchParams(from);
  for (const [key, value] of Object.entries(changes)) {
    if (value === null || value === undefined || value === "") params.delete(key);
    else params.set(key, String(value));
  }
  const text = params.toString();
  return `#${view}${text ? `?${text}` : ""}`;
}

/** Only the chosen runs: what stays when another view is opened. */
export function runsOnly(params: URLSearchParams): URLSearchParams {
  return new URLSearchParams(params.getAll("run").map((run) => ["run", run]));
}

export function go(to: string): void {
  if (to !== location.hash) location.hash = to;
}

/** Changes the address without a new entry in the history: for sliders and text that is being typed. */
export function replace(to: string): void {
  if (to === location.hash) return;
  history.replaceState(null, "", to);
  dispatchEvent(new HashChangeEvent("hashchange"));
}

export function useRoute(): Route {
  const [route, setRoute] = useState(() => parse(location.hash));
  useEffect(() => {
    const read = () => setRoute(parse(location.hash));
    addEventListener("hashchange", read);
    return () => removeEventListener("hashchange", read);
  }, []);
  return route;
}

export function whole(params: URLSearchParams, key: string): number | undefined {
  const text = params.get(key);
  if (text === null || text.trim() === "") return undefined;
  const value = Number(text);
  return Number.isFinite(value) ? value : undefined;
}
