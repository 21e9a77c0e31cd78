/** What every view is given. */

import type { Route, View, Changes } from "./route";
import { go, href, replace, runsOnly } from "./route";
import type { Run } from "./types";

export interface Page {
  route: Route;
  /** All runs of the server. */
  runs: Run[];
  /** The chosen runs; the first is the one that views of a single run show. */
  chosen: Run[];
  main: Run | undefined;
  colour: (run: string) => string;
}

/** The same view with other parameters. */
export function set(page: Page, changes: Changes): void {
  go(href(page.route.view, page.route.params, changes));
}

/** The same, without an entry in the history. */
export function adjust(page: Page, changes: Changes): void {
  replace(href(page.route.view, page.route.params, changes));
}

/** Another view of the same runs. */
export function link(page: Page, view: View, changes: Changes = {}): string {
  return href(view, runsOnly(page.route.params), changes);
}
