/**
 * What a model wrote, as text: never as markup, with every character that has no shape of its own made visible, and
 * without any effect of characters that change the direction of what surrounds them.
 */

import type { ComponentChildren } from "preact";
import { useMemo } from "preact/hooks";

const NAMES: Record<number, string> = {
  0x00: "null",
  0x07: "bell",
  0x08: "backspace",
  0x0b: "vertical tab",
  0x0c: "form feed",
  0x0d: "carriage return",
  0x1b: "escape",
  0x7f: "delete",
  0xad: "soft hyphen",
  0x61c: "Arabic letter mark",
  0x200b: "zero width space",
  0x200c: "zero width non-joiner",
  0x200d: "zero width joiner",
  0x200e: "left-to-right mark",
  0x200f: "right-to-left mark",
  0x2028: "line separator",
  0x2029: "paragraph separator",
  0x202a: "left-to-right embedding",
  0x202b: "right-to-left embedding",
  0x202c: "pop directional formatting",
  0x202d: "left-to-right override",
  0x202e: "right-to-left override",
  0x2060: "word joiner",
  0x2066: "left-to-right isolate",
  0x2067: "right-to-left isolate",
  0x2068: "first strong isolate",
  0x2069: "pop directional isolate",
  0xfeff: "byte order mark",
  0xfffd: "replacement character: bytes that are not UTF-8",
};

// Control characters but tab and newline, format characters, separators, private use, lone surrogates. A joiner between
// two pictures belongs to them: 👩‍👩‍👧.
const HIDDEN =
  /(?<!\p{Extended_Pictographic}\uFE0F?)\u200D|\u200D(?!\p{Extended_Pictographic})|[\p{Cc}\p{Zl}\p{Zp}\p{Co}\p{Cs}\uFFFD]|(?!\u200D)\p{Cf}/gu;
const SPACED = new RegExp(`${HIDDEN.source}|[ \u00A0\u2000-\u200A\u3000]`, "gu");

function label(char: string, spaces: boolean): ComponentChildren {
  const code = char.codePointAt(0) ?? 0;
  if (char === "\n") return spaces ? <span class="ws">↵{"\n"}</span> : "\n";
  if (char === "\t") return spaces ? <span class="ws">⇥{"\t"}</span> : "\t";
  if (char === " ") return <span class="ws">·</span>;
  const hex = `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
  const short = code < 0x100 ? `\\x${code.toString(16).padStart(2, "0")}` : hex;
  return (
    <span class="ctl" title={`${hex} ${NAMES[code] ?? "no visible form"}`}>
      {short}
    </span>
  );
}

/** The pieces of a text: strings to show as they are, and labels for characters that cannot be seen. */
export function visible(text: string, spaces = false): ComponentChildren[] {
  const pieces: ComponentChildren[] = [];
  let done = 0;
  for (const match of text.matchAll(spaces ? SPACED : HIDDEN)) {
    const char = match[0];
    if (!spaces && (char === "\n" || char === "\t")) continue;
    if (match.index > done) pieces.push(text.slice(done, match.index));
    pieces.push(label(char, spaces));
    done = match.index + char.length;
  }
  if (done < text.length) pieces.push(text.slice(done));
  return pieces;
}

/** A text in a box of its own direction; `find` is marked where it occurs. */
export function Text({ text, find = "", class: name = "" }: { text: string; find?: string; class?: string }) {
  const pieces = useMemo(() => (find ? marked(text, find) : visible(text)), [text, find]);
  return (
    <bdi class={`text ${name}`} dir="auto">
      {text === "" ? <span class="muted">(empty)</span> : pieces}
    </bdi>
  );
}

function marked(text: string, find: string): ComponentChildren[] {
  const lower = text.toLowerCase();
  const wanted = find.toLowerCase();
  const pieces: ComponentChildren[] = [];
  let done = 0;
  // Lower case can be longer than the text (İ): then places would not fit, and nothing is marked.
  for (let at = lower.length === text.length ? lower.indexOf(wanted) : -1; at >= 0; at = lower.indexOf(wanted, done)) {
    pieces.push(...visible(text.slice(done, at)), <mark>{visible(text.slice(at, at + wanted.length))}</mark>);
    done = at + wanted.length;
  }
  return [...pieces, ...visible(text.slice(done))];
}

/** A part of a text that cuts no character in half: half of a pair of UTF-16 would get a label as if it was there. */
export function clip(text: string, start: number, end: number): string {
  const halved = (at: number) => at > 0 && (text.codePointAt(at - 1) ?? 0) > 0xffff;
  return text.slice(halved(start) ? start - 1 : start, halved(end) ? end - 1 : end);
}

/** The part of a text around the first place where `find` occurs, for a list. */
export function excerpt(text: string, find: string, length = 220): string {
  const at = find ? text.toLowerCase().indexOf(find.toLowerCase()) : -1;
  const start = at < length / 2 ? 0 : at - Math.floor(length / 3);
  return (start > 0 ? "… " : "") + clip(text, start, start + length) + (start + length < text.length ? " …" : "");
}
