import { useEffect, useRef } from "preact/hooks";

const KEYS: readonly (readonly [string, string])[] = [
  ["1 … 9", "the views, in the order of their tabs"],
  ["/", "to the search field of the view"],
  ["← →", "step before and after (rollouts); sample before and after (tokens); with a chart in focus, its cursor"],
  ["Home End", "first and last step (rollouts)"],
  ["j k", "next group and group before (rollouts)"],
  ["[ ]", "group before and next group (tokens)"],
  [", .", "step before and after (tokens)"],
  ["← → ↑ ↓", "with the tokens in focus: one or ten tokens back and on"],
  ["Esc", "closes what is open"],
  ["?", "this help"],
];

export function Help({ onClose }: { onClose: () => void }) {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => dialog.current?.showModal(), []);
  return (
    <dialog
      ref={dialog}
      class="help"
      aria-label="Help"
      onClose={onClose}
      onClick={(e) => e.target === dialog.current && dialog.current?.close()}
    >
      <div>
        <header>
          <h2>Keys</h2>
          <button type="button" class="icon" aria-label="Close" onClick={() => dialog.current?.close()}>
            ✕
          </button>
        </header>
        <dl class="keys">
          {KEYS.map(([key, what]) => (
            <div key={key}>
              <dt>
                <kbd>{key}</kbd>
              </dt>
              <dd>{what}</dd>
            </div>
          ))}
        </dl>
        <h2>Good to know</h2>
        <ul>
          <li>Drag over a chart to zoom all of them; double-click to see everything again.</li>
          <li>The address holds runs, view, step and filters: copy it to come back to the same place.</li>
          <li>
            Runs that are training are followed by themselves. This page only reads, and asks no other machine for
            anything.
          </li>
          <li>Blue is high or pushed up, orange is low or pushed down, in every view.</li>
        </ul>
      </div>
    </dialog>
  );
}
