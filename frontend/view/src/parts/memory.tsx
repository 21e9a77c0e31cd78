/** Memory by process, phase and part: what was planned as a bar, what was measured as a line across it. */

import { bytes } from "../format";
import type { Memory as MemoryAnswer, Num, Process } from "../types";

/** Phases in the order in which a run has them; "between" has no plan, "evaluating" no measurement of its own. */
const PHASES: Record<string, string> = {
  loading: "loading the model",
  generating: "generating",
  evaluating: "evaluating, which is measured with what is between steps",
  training: "training",
  between: "between steps: evaluations, checkpoints, publishing weights",
  exporting: "exporting the model",
  serving: "serving",
  always: "all the time",
};

const sum = (parts: Record<string, number> | undefined) => Object.values(parts ?? {}).reduce((a, b) => a + b, 0);

export function Memory({ memory, of = "" }: { memory: MemoryAnswer | null; of?: string }) {
  const title = <h2>Memory{of && ` of ${of}`}</h2>;
  if (!memory?.processes.length) {
    const peak = memory?.measured_peak_bytes;
    return (
      <section>
        {title}
        {peak ? (
          <p>measured peak {bytes(peak)}</p>
        ) : (
          <p class="muted">Neither planned nor measured. `trew plan` estimates it before a run.</p>
        )}
        <Why memory={memory} />
      </section>
    );
  }
  return (
    <section>
      {title}
      <Why memory={memory} />
      <All processes={memory.processes} prompt={memory.prompt_tokens} />
    </section>
  );
}

function Why({ memory }: { memory: MemoryAnswer | null }) {
  return memory?.why ? <p class="note">Memory could not be planned: {memory.why}</p> : null;
}

function All({ processes, prompt }: { processes: readonly Process[]; prompt: Num }) {
  const parts = [...new Set(processes.flatMap((p) => Object.values(p.planned).flatMap(Object.keys)))];
  return (
    <>
      <p class="muted">
        Bars: planned, for prompts{prompt ? ` of ${prompt} tokens` : ""} and completions as long as they may be. Upright
        lines: the most that was measured.
      </p>
      {groups(processes).map(([name, process]) => (
        <One key={name} name={name} process={process} parts={parts} />
      ))}
      <Key parts={parts} />
    </>
  );
}

/** Processes that are alike are shown once: "rank 0 to 7". */
function groups(processes: readonly Process[]): [string, Process][] {
  const found: { first: string; last: string; count: number; key: string; process: Process }[] = [];
  for (const process of processes) {
    const key = JSON.stringify([process.device, process.planned, process.measured, process.who.replace(/\d+$/, "")]);
    const before = found.at(-1);
    if (before?.key === key) {
      before.last = process.who.replace(/^\D*/, "");
      before.count += 1;
    } else {
      found.push({ first: process.who, last: "", count: 1, key, process });
    }
  }
  return found.map((f) => [f.count > 1 ? `${f.first} to ${f.last}` : f.first, f.process]);
}

function One({ name, process, parts }: { name: string; process: Process; parts: readonly string[] }) {
  const known = Object.keys(PHASES);
  const phases = [...new Set([...Object.keys(process.planned), ...Object.keys(process.measured)])].sort(
    (a, b) => known.indexOf(a) - known.indexOf(b),
  );
  const peak = process.measured_peak_bytes ?? 0;
  const most = Math.max(...phases.flatMap((p) => [sum(process.planned[p]), process.measured[p] ?? 0]), peak, 1);
  const planned = Math.max(0, ...Object.values(process.planned).map(sum));
  return (
    <div class="memory">
      <h3>
        {name} {process.device && <span class="muted">on {process.device}</span>}
      </h3>
      <p>
        {[
          ...(planned ? [`planned ${bytes(planned)}`] : []),
          ...(peak ? [`measured peak ${bytes(peak)}`] : []),
          ...(planned && peak ? [`${Math.round((100 * peak) / planned)} % of the plan`] : []),
        ].join(" · ")}
      </p>
      <dl class="memory-phases">
        {phases.map((phase) => (
          <Phase key={phase} phase={phase} process={process} parts={parts} most={most} />
        ))}
      </dl>
    </div>
  );
}

interface PhaseProps {
  phase: string;
  process: Process;
  parts: readonly string[];
  most: number;
}

function Phase({ phase, process, parts, most }: PhaseProps) {
  const planned = process.planned[phase];
  const measured = process.measured[phase];
  const words = [
    planned ? `planned ${bytes(sum(planned))}` : "not planned",
    ...(measured === undefined ? [] : [`measured ${bytes(measured)}`]),
  ].join(", ");
  return (
    <>
      <dt title={PHASES[phase]}>{phase}</dt>
      <dd>
        <div class="memory-bar" role="img" aria-label={`${phase}: ${words}`}>
          {parts.map((part, i) =>
            planned?.[part] ? (
              <span
                key={part}
                class={`memory-part m${i % 12}`}
                style={{ width: `${(100 * planned[part]) / most}%` }}
                title={`${part}: ${bytes(planned[part])}`}
              />
            ) : null,
          )}
          {measured !== undefined && (
            <span
              class="memory-peak"
              style={{ left: `${(100 * measured) / most}%` }}
              title={`measured: ${bytes(measured)}`}
            />
          )}
        </div>
        <span class="memory-words muted">{words}</span>
        {planned && (
          <details class="memory-table">
            <summary>parts</summary>
            <table class="plain">
              <tbody>
                {Object.entries(planned).map(([part, size]) => (
                  <tr key={part}>
                    <th scope="row">{part}</th>
                    <td>{bytes(size)}</td>
                  </tr>
                ))}
              </tbody>
            </table>
          </details>
        )}
      </dd>
    </>
  );
}

function Key({ parts }: { parts: readonly string[] }) {
  return (
    <ul class="memory-parts">
      {parts.map((part, i) => (
        <li key={part}>
          <span class={`swatch memory-part m${i % 12}`} /> {part}
        </li>
      ))}
    </ul>
  );
}
