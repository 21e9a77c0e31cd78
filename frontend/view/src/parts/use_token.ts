import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { adjust, type Page } from "../context";
import { useKeys } from "../hooks";
import { whole } from "../route";

/** The token under the pointer, or else the one that was tapped or walked to: in the address, so that it can be linked to. */
export function useToken(page: Page, count: number) {
  const area = useRef<HTMLDivElement>(null);
  const [hovered, hover] = useState<number | null>(null);
  const asked = whole(page.route.params, "token");
  const pinned = asked !== undefined && asked >= 0 && asked < count ? asked : null;
  const at = hovered ?? pinned;
  const pin = useCallback((i: number | null) => adjust(page, { token: i === pinned ? null : i }), [page, pinned]);

  useEffect(() => {
    const box = area.current;
    if (!box) return;
    const indexOf = (event: Event) => {
      const token = event.target instanceof Element ? event.target.closest<HTMLElement>("[data-i]") : null;
      return token ? Number(token.dataset["i"]) : null;
    };
    const over = (event: PointerEvent) => event.pointerType !== "touch" && hover(indexOf(event));
    const leave = () => hover(null);
    const click = (event: MouseEvent) => {
      const i = indexOf(event);
      if (i !== null && !String(getSelection())) pin(i);
    };
    const key = (event: KeyboardEvent) => {
      const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10 }[event.key];
      if (!by || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      event.stopPropagation();
      adjust(page, { token: Math.max(0, Math.min(count - 1, (pinned ?? (by > 0 ? -1 : count)) + by)) });
    };
    box.addEventListener("pointerover", over);
    box.addEventListener("pointerleave", leave);
    box.addEventListener("click", click);
    box.addEventListener("keydown", key);
    return () => {
      box.removeEventListener("pointerover", over);
      box.removeEventListener("pointerleave", leave);
      box.removeEventListener("click", click);
      box.removeEventListener("keydown", key);
    };
  }, [page, pin, pinned, count]);

  useKeys({ Escape: () => pinned !== null && pin(null) });
  useMarked(area, at, pinned);
  return { at, pinned, hover, pin, area };
}

/** Marks the token in the text without drawing thousands of others again, and brings a pinned one into view. */
function useMarked(area: { current: HTMLDivElement | null }, at: number | null, pinned: number | null): void {
  useEffect(() => {
    const token = at === null ? null : document.getElementById(`t${at}`);
    token?.classList.add("at");
    return () => token?.classList.remove("at");
  }, [at]);
  useEffect(() => {
    if (pinned === null) return;
    // A piece far below does not exist before it is near the screen.
    const piece = [...(area.current?.querySelectorAll<HTMLElement>("[data-piece]") ?? [])].find(
      (p) => Number(p.dataset["piece"]) <= pinned && pinned < Number(p.dataset["end"]),
    );
    const found = document.getElementById(`t${pinned}`);
    (found ?? piece)?.scrollIntoView({ block: "nearest" });
    if (found || !piece) return;
    const timer = setTimeout(() => {
      const late = document.getElementById(`t${pinned}`);
      late?.classList.add("at");
      late?.scrollIntoView({ block: "center" });
    }, 150);
    return () => clearTimeout(timer);
  }, [area, pinned]);
}
