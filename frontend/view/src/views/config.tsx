import { query, runPath } from "../api";
import { adjust, set, type Page } from "../context";
import { plain, plural } from "../format";
import { useApi } from "../hooks";
import { Empty, Field, Loaded } from "../parts/basics";
import { Text } from "../parts/text";
import { Memory } from "../parts/memory";
import type { Config as ConfigAnswer, ConfigKeys, Run, Summary } from "../types";

export function Config({ page }: { page: Page }) {
  const ids = page.chosen.map((r) => r.id);
  const revision = page.chosen.map((r) => r.revision).join();
  const answer = useApi<ConfigKeys>(ids.length ? query("api/config", { run: ids }) : null, revision);
  if (!page.main) return <Empty title="No run is chosen.">Choose one in the list of runs.</Empty>;
  const main = page.main;
  return (
    <>
      <Loaded answer={answer} show={(data) => <Keys page={page} data={data} />} />
      <MemoryOf run={main} several={page.chosen.length > 1} />
      <Whole run={main} />
    </>
  );
}

type Key = ConfigKeys["keys"][number];

/** A run that does not name a setting has not changed it. */
function isChangedIn(k: Key, run: Run): boolean {
  return "default" in k && run.id in k.values && plain(k.values[run.id]) !== plain(k.default);
}

function Keys({ page, data }: { page: Page; data: ConfigKeys }) {
  const params = page.route.params;
  const several = page.chosen.length > 1;
  const search = params.get("key") ?? "";
  const onlyDiffering = several && !params.has("all");
  // Of reward models no defaults are known.
  const judged = data.keys.some((k) => "default" in k);
  const onlyChanged = params.has("changed");
  const isChanged = (k: Key) => page.chosen.some((r) => isChangedIn(k, r));
  const rows = data.keys.filter(
    (k) =>
      (!onlyDiffering || k.differs) &&
      (!onlyChanged || !judged || isChanged(k)) &&
      `${k.key} ${Object.values(k.values).map(plain).join(" ")}`.toLowerCase().includes(search.toLowerCase()),
  );
  const differing = data.keys.filter((k) => k.differs).length;
  return (
    <section>
      <h2>
        {several
          ? `${plural(differing, "setting")} differ${differing === 1 ? "s" : ""} between ${page.chosen.length} runs`
          : `Settings of ${page.main?.name}`}
      </h2>
      <div class="controls">
        <Field
          label="Search settings"
          value={search}
          onInput={(v) => adjust(page, { key: v })}
          placeholder="lr, data …  (press /)"
          search
        />
        {several && (
          <label class="check">
            <input
              type="checkbox"
              checked={onlyDiffering}
              onChange={(e) => set(page, { all: e.currentTarget.checked ? null : 1 })}
            />{" "}
            only what differs
          </label>
        )}
        {judged && <OnlyChanged page={page} checked={onlyChanged} />}
      </div>
      {!rows.length && (
        <Empty title={onlyDiffering && !search ? "These runs have the same settings." : "No setting fits."} />
      )}
      {rows.length > 0 && <Table page={page} rows={rows} judged={judged} />}
    </section>
  );
}

function OnlyChanged({ page, checked }: { page: Page; checked: boolean }) {
  return (
    <label class="check">
      <input
        type="checkbox"
        checked={checked}
        onChange={(e) => set(page, { changed: e.currentTarget.checked ? 1 : null })}
      />{" "}
      only what is not the default
    </label>
  );
}

/** `judged`: whether defaults are known. */
function Table({ page, rows, judged }: { page: Page; rows: Key[]; judged: boolean }) {
  const several = page.chosen.length > 1;
  return (
    <div class="scroll">
      <table class="plain config">
        <thead>
          <tr>
            <th>setting</th>
            {page.chosen.map((r) => (
              <th key={r.id}>
                <span class="swatch" style={{ background: page.colour(r.id) }} /> {r.name}
              </th>
            ))}
            {judged && <th>default</th>}
          </tr>
        </thead>
        <tbody>
          {rows.map((k) => (
            <tr key={k.key} class={several && k.differs ? "differs" : ""}>
              <th scope="row">{k.key}</th>
              {page.chosen.map((r) => (
                <td key={r.id} class={isChangedIn(k, r) ? "changed" : ""}>
                  <Text text={plain(k.values[r.id])} />
                </td>
              ))}
              {judged && <td class="muted">{"default" in k ? plain(k.default) : ""}</td>}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function MemoryOf({ run, several }: { run: Run; several: boolean }) {
  const { data } = useApi<Summary>(runPath(run.id, "summary"), run.revision);
  if (!data) return null;
  return <Memory memory={data.memory} {...(several ? { of: run.name } : {})} />;
}

function Whole({ run }: { run: Run }) {
  const answer = useApi<ConfigAnswer>(runPath(run.id, "config"), run.revision);
  return (
    <details class="section">
      <summary>
        <h2>config.toml of {run.name}</h2>
      </summary>
      <Loaded answer={answer} show={(data) => <Text text={data.text} class="code" />} />
    </details>
  );
}
