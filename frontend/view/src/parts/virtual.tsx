/** A list of any length of which only the visible rows exist; pages of rows are asked for as they come into view. */

import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { AGAIN_MS, get, NoAnswer } from "../api";
import { Failure } from "./basics";

const PAGE = 50;
const AROUND = 6;
// Browsers lay out boxes up to some ten million pixels high.
const MOST_PIXELS = 8_000_000;

interface VirtualProps<T> {
  /** The address of a page: it must not depend on anything else. */
  url: (offset: number, limit: number) => string;
  /** Pages are asked for again when it changes; what is shown stays until they are there. */
  revision: string;
  read: (body: unknown) => { total: number; rows: T[] };
  height: number;
  row: (item: T, index: number) => ComponentChildren;
  empty: ComponentChildren;
  onTotal: (total: number | undefined) => void;
  label: string;
}

export function VirtualList<T>(props: VirtualProps<T>) {
  const { url, height, row, empty, label } = props;
  const first = url(0, PAGE);
  const list = useRef<HTMLDivElement>(null);
  const [view, setView] = useState({ from: 0, to: 20 });
  const { rows, total, error } = usePages(props, first, view);
  const count = Math.min(total ?? 0, Math.floor(MOST_PIXELS / height));

  useEffect(() => {
    const look = () => {
      const box = list.current;
      if (!box) return;
      const top = -box.getBoundingClientRect().top;
      const from = Math.max(0, Math.floor(top / height) - AROUND);
      const to = Math.ceil((top + innerHeight) / height) + AROUND;
      setView((old) => (old.from === from && old.to === to ? old : { from, to }));
    };
    look();
    addEventListener("scroll", look, { passive: true });
    addEventListener("resize", look);
    return () => {
      removeEventListener("scroll", look);
      removeEventListener("resize", look);
    };
  }, [height, total]);

  const shown = [];
  for (let i = view.from; i < Math.min(count, view.to); i += 1) {
    const item = rows.get(i);
    shown.push(
      <li
        key={i}
        class="virtual-row"
        style={{ top: `${i * height}px`, height: `${height}px` }}
        aria-setsize={total}
        aria-posinset={i + 1}
      >
        {item === undefined ? <span class="muted">…</span> : row(item, i)}
      </li>,
    );
  }
  if (error) return <Failure message={error} />;
  if (total === undefined) return <p class="loading">Loading …</p>;
  if (!total) return <>{empty}</>;
  return (
    <div ref={list}>
      <ul class="virtual" aria-label={label} style={{ height: `${count * height}px` }}>
        {shown}
      </ul>
      {count < total && (
        <p class="note">
          Only the first {count.toLocaleString("en-US")} are listed. Narrow the filters to see the others.
        </p>
      )}
    </div>
  );
}

interface Pages<T> {
  first: string;
  rows: Map<number, T>;
  total: number | undefined;
  error: string | undefined;
  answers: number;
}

function usePages<T>(
  { url, revision, read, onTotal }: VirtualProps<T>,
  first: string,
  view: { from: number; to: number },
): Pages<T> {
  const nothing = { first, rows: new Map<number, T>(), total: undefined, error: undefined };
  const [pages, setPages] = useState<Pages<T>>({ ...nothing, answers: 0 });
  // refused: the server has answered that it cannot; it is asked again for a newer revision alone.
  const asked = useRef({ first: "", revision: "", pages: new Set<number>(), waiting: 0, refused: false });
  const current = useRef({ url, read, onTotal });
  current.current = { url, read, onTotal };

  useEffect(() => {
    // A newer revision waits for the answers of the one before: a slow server would never be heard to the end.
    const old = asked.current.revision !== revision && asked.current.waiting === 0;
    if (asked.current.first !== first || old)
      asked.current = { first, revision, pages: new Set(), waiting: 0, refused: false };
    const mine = asked.current;
    if (mine.refused) return;
    const last = pages.first === first && pages.total !== undefined ? Math.max(0, pages.total - 1) : undefined;
    const wanted =
      last === undefined ? [0] : range(Math.floor(view.from / PAGE), Math.floor(Math.min(view.to, last) / PAGE));
    for (const page of wanted) {
      if (mine.pages.has(page)) continue;
      mine.pages.add(page);
      mine.waiting += 1;
      get(current.current.url(page * PAGE, PAGE))
        .then((body) => {
          if (asked.current !== mine) return;
          mine.waiting -= 1;
          if (mine.refused) return;
          const { total, rows } = current.current.read(body);
          current.current.onTotal(total);
          setPages((old) => {
            const all = new Map(old.first === first ? old.rows : []);
            rows.forEach((item, i) => all.set(page * PAGE + i, item));
            return { first, rows: all, total, error: undefined, answers: old.answers + 1 };
          });
        })
        .catch((error: unknown) => {
          if (asked.current !== mine) return;
          mine.pages.clear(); // the rows of all pages are taken away below
          mine.waiting -= 1;
          current.current.onTotal(undefined); // what was counted is of the question before
          const message = error instanceof Error ? error.message : String(error);
          setPages((old) => ({ first, rows: new Map(), total: undefined, error: message, answers: old.answers }));
          mine.refused = !(error instanceof NoAnswer);
          if (mine.refused) return;
          setTimeout(() => setPages((old) => ({ ...old, answers: old.answers + 1 })), AGAIN_MS);
        });
    }
  }, [first, revision, view.from, view.to, pages.first, pages.total, pages.answers]);
  return pages.first === first ? pages : { ...nothing, answers: pages.answers };
}

function range(from: number, to: number): number[] {
  return Array.from({ length: Math.max(0, to - from + 1) }, (_, i) => from + i);
}
