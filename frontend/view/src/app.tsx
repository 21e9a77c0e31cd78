import { useCallback, useEffect, useMemo, useState } from "preact/hooks";
import { get } from "./api";
import { runColour } from "./colour";
import type { Page } from "./context";
import { useKeys } from "./hooks";
import { Empty, Failure, State } from "./parts/basics";
import { Help } from "./parts/help";
import { go, href, replace, runsOnly, useRoute, VIEWS, type Route, type View } from "./route";
import type { Run, Runs } from "./types";
import { Compare } from "./views/compare";
import { Config } from "./views/config";
import { Curves } from "./views/curves";
import { Health } from "./views/health";
import { Home } from "./views/home";
import { Prompts } from "./views/prompts";
import { Rollouts } from "./views/rollouts";
import { Search } from "./views/search";
import { Tokens } from "./views/tokens";

const TITLES: Record<View, string> = {
  runs: "Runs",
  curves: "Curves",
  rollouts: "Rollouts",
  tokens: "Tokens",
  prompts: "Prompts",
  search: "Search",
  health: "Health",
  config: "Configuration",
  compare: "Compare",
};

const SHOW: Record<View, (props: { page: Page }) => preact.ComponentChildren> = {
  runs: Home,
  curves: Curves,
  rollouts: Rollouts,
  tokens: Tokens,
  prompts: Prompts,
  search: Search,
  health: Health,
  config: Config,
  compare: Compare,
};

/** Views of one run: with several chosen, they show the one that is picked. */
const SINGLE: readonly View[] = ["rollouts", "tokens", "prompts", "search", "health"];

const POLL_MS = 2000;

/** The list of runs, asked for again and again: slower while the page is hidden or the server is away. */
function useRuns(): { runs: Runs | undefined; error: string | undefined; again: () => void } {
  const [runs, setRuns] = useState<Runs>();
  const [error, setError] = useState<string>();
  const [nudge, setNudge] = useState(0);
  useEffect(() => {
    let timer = 0;
    let failed = 0;
    let busy = false; // one question at a time: each answer leads to the next
    const abort = new AbortController();
    const ask = () => {
      if (busy) return;
      busy = true;
      get<Runs>("api/runs", abort.signal)
        .then((found) => {
          failed = 0;
          setError(undefined);
          setRuns((old) => (JSON.stringify(old) === JSON.stringify(found) ? old : found));
        })
        .catch((reason: unknown) => {
          if (abort.signal.aborted) return;
          failed += 1;
          setError(reason instanceof Error ? reason.message : String(reason));
        })
        .finally(() => {
          busy = false;
          if (abort.signal.aborted) return;
          timer = window.setTimeout(ask, POLL_MS * (document.hidden ? 15 : Math.min(8, 2 ** failed)));
        });
    };
    ask();
    const shown = () => {
      if (document.hidden) return;
      clearTimeout(timer);
      ask();
    };
    document.addEventListener("visibilitychange", shown);
    return () => {
      abort.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", shown);
    };
  }, [nudge]);
  return { runs, error, again: useCallback(() => setNudge((n) => n + 1), []) };
}

/** What the address means: without runs in it the first is shown, and in the list none is chosen. */
function pageOf(route: Route, runs: Run[]): Page {
  const asked = route.params.getAll("run");
  const chosen = runs.filter((r) => asked.includes(r.id));
  // The chosen runs get the first colours, so that no two of up to eight look the same.
  const places = new Map((chosen.length ? chosen : runs).map((r, i) => [r.id, i]));
  const ordered = chosen.sort((a, b) => asked.indexOf(a.id) - asked.indexOf(b.id));
  const meant = ordered.length || route.view === "runs" ? ordered : runs.slice(0, 1);
  return { route, runs, chosen: meant, main: meant[0], colour: (id) => colourOf(places.get(id)) };
}

function colourOf(place: number | undefined): string {
  return place === undefined ? "var(--line)" : runColour(place);
}

export function App() {
  const route = useRoute();
  const { runs, error, again } = useRuns();
  const [help, setHelp] = useState(false);
  const { view, params } = route;
  useKeys({
    "?": () => setHelp((open) => !open),
    "/": focusSearch,
    ...Object.fromEntries(VIEWS.map((each, i) => [String(i + 1), () => go(href(each, runsOnly(params)))])),
  });
  const page = useMemo(() => (runs ? pageOf(route, runs.runs) : null), [runs, route]);
  useEffect(() => {
    // A run that begins later may be the first one then: what is shown stays, and the address leads back to it.
    if (page?.main && view !== "runs" && !params.has("run")) replace(href(view, params, { run: page.main.id }));
  }, [page, view, params]);
  useEffect(() => {
    const run = page?.main && view !== "runs" ? `${page.main.name} · ` : "";
    document.title = `${run}${TITLES[view]} · trew view`;
  }, [page, view]);
  return (
    <>
      <a class="skip" href="#main" onClick={skip}>
        To the content
      </a>
      <Header view={view} params={params} page={page} onHelp={() => setHelp(true)} />
      <main id="main" tabIndex={-1} class={`view-${view}`}>
        {error && (
          <Offline
            message={runs ? `${error} What is shown may be old; the page asks again by itself.` : error}
            again={again}
          />
        )}
        {view === "runs" && runs?.left_out?.map((text) => <Failure key={text} message={text} />)}
        {page ? <Content page={page} /> : !error && <p class="loading">Reading the run folders …</p>}
      </main>
      <footer>
        trew {runs?.version} · reads run folders and changes nothing ·{" "}
        <button type="button" class="as-text" onClick={() => setHelp(true)}>
          keys and help (?)
        </button>
      </footer>
      {help && <Help onClose={() => setHelp(false)} />}
    </>
  );
}

function skip(event: Event): void {
  event.preventDefault();
  document.getElementById("main")?.focus();
}

function Offline({ message, again }: { message: string; again: () => void }) {
  return (
    <div class="offline">
      <Failure message={message} />
      <button type="button" onClick={again}>
        Ask again
      </button>
    </div>
  );
}

function Content({ page }: { page: Page }) {
  const { view } = page.route;
  const View = SHOW[view];
  return (
    <>
      <Missing page={page} />
      {SINGLE.includes(view) && page.chosen.length > 1 && <Pick page={page} />}
      <View page={page} />
    </>
  );
}

function focusSearch(): void {
  const field = document.querySelector<HTMLInputElement>("[data-search]");
  field?.focus();
  field?.select();
}

/** Runs in the address that this server does not have. */
function Missing({ page }: { page: Page }) {
  const gone = page.route.params.getAll("run").filter((id) => !page.runs.some((r) => r.id === id));
  if (!gone.length) return null;
  return (
    <Empty title={`This server has no run "${gone.join('", "')}".`}>
      Its folder was not given to <code>trew view</code>, or was moved. <a href="#runs">All runs</a>
    </Empty>
  );
}

function Header({
  view,
  params,
  page,
  onHelp,
}: {
  view: View;
  params: URLSearchParams;
  page: Page | null;
  onHelp: () => void;
}) {
  const [theme, setTheme] = useTheme();
  const main = page?.main;
  return (
    <header class="top">
      <a class="brand" href={href("runs", runsOnly(params))} aria-label="trew view: all runs">
        <svg viewBox="0 0 32 32" width="24" height="24" aria-hidden="true">
          <rect width="32" height="32" rx="7" class="brand-back" />
          <path d="M6 22l6-6 5 4 9-11" class="brand-line" />
          <circle cx="26" cy="9" r="3" class="brand-dot" />
        </svg>
        <span>trew view</span>
      </a>
      <nav aria-label="Views">
        {VIEWS.map((each) => (
          <a key={each} href={href(each, runsOnly(params))} aria-current={each === view ? "page" : undefined}>
            {TITLES[each]}
          </a>
        ))}
      </nav>
      <div class="top-run">
        {view !== "runs" && main && page.chosen.length === 1 && (
          <>
            <RunSelect page={page} />
            <State run={main} />
          </>
        )}
        {view !== "runs" && page && page.chosen.length > 1 && (
          <a href={href("runs", runsOnly(params))}>{page.chosen.length} runs</a>
        )}
        <button
          type="button"
          class="icon"
          title={`Colours: ${theme}`}
          aria-label={`Colours: ${theme}. Change`}
          onClick={() => setTheme(NEXT[theme])}
        >
          {theme === "dark" ? "☾" : theme === "light" ? "☀" : "◐"}
        </button>
        <button type="button" class="icon" title="Keys and help (?)" aria-label="Help" onClick={onHelp}>
          ?
        </button>
      </div>
    </header>
  );
}

/** Another run in the place of the one that is shown, in the same view. */
function RunSelect({ page }: { page: Page }) {
  const { view } = page.route;
  return (
    <select
      aria-label="Run"
      value={page.main?.id ?? ""}
      onChange={(e) => go(href(view, new URLSearchParams([["run", e.currentTarget.value]])))}
    >
      {page.runs.map((r) => (
        <option key={r.id} value={r.id}>
          {r.name}
        </option>
      ))}
    </select>
  );
}

/** Of several chosen runs, the one that this view shows comes first in the address. */
function Pick({ page }: { page: Page }) {
  const first = (id: string) => {
    const ids = [id, ...page.chosen.map((r) => r.id).filter((each) => each !== id)];
    go(href(page.route.view, new URLSearchParams(ids.map((each) => ["run", each]))));
  };
  return (
    <div class="pick segmented" role="group" aria-label="Run to show">
      {[...page.chosen]
        .sort((a, b) => page.runs.indexOf(a) - page.runs.indexOf(b))
        .map((r) => (
          <button key={r.id} type="button" aria-pressed={r.id === page.main?.id} onClick={() => first(r.id)}>
            <span class="swatch" style={{ background: page.colour(r.id) }} /> {r.name}
          </button>
        ))}
    </div>
  );
}

type Theme = "system" | "light" | "dark";
const NEXT: Record<Theme, Theme> = { system: "light", light: "dark", dark: "system" };

function stored(): Theme {
  try {
    const found = localStorage.getItem("trew-theme");
    return found === "light" || found === "dark" ? found : "system";
  } catch {
    return "system"; // A frame in a notebook may have no storage.
  }
}

function useTheme(): [Theme, (theme: Theme) => void] {
  const [theme, setTheme] = useState<Theme>(stored);
  useEffect(() => {
    if (theme === "system") delete document.documentElement.dataset["theme"];
    else document.documentElement.dataset["theme"] = theme;
    dispatchEvent(new Event("trew-theme"));
    try {
      localStorage.setItem("trew-theme", theme);
    } catch {
      // It is forgotten then.
    }
  }, [theme]);
  return [theme, setTheme];
}
