import { createHash } from "node:crypto";
import { readFileSync, readdirSync, statSync } from "node:fs";
import { join, relative } from "node:path";
import { defineConfig, type Plugin } from "vite";

const HERE = import.meta.dirname;

/** Every file that the built page depends on, in a fixed order. */
function sources(folder = HERE): string[] {
  return readdirSync(folder)
    .filter((name) => name !== "node_modules")
    .map((name) => join(folder, name))
    .flatMap((path) => (statSync(path).isDirectory() ? sources(path) : [path]))
    .sort();
}

/** Writes build.json with a hash of the sources and of what was built, by which a test finds a stale build. */
function record(): Plugin {
  const sha256 = (data: string | Uint8Array) => createHash("sha256").update(data).digest("hex");
  return {
    name: "record",
    enforce: "post",
    generateBundle(_options, bundle) {
      const lines = sources()
        .map((path) => `${relative(HERE, path).split("\\").join("/")} ${sha256(readFileSync(path))}\n`)
        .sort();
      const files = Object.values(bundle).map((f) => [f.fileName, sha256(f.type === "chunk" ? f.code : f.source)]);
      const text = JSON.stringify(
        { sources: sha256(lines.join("")), files: Object.fromEntries(files.sort()) },
        null,
        1,
      );
      this.emitFile({ type: "asset", fileName: "build.json", source: text + "\n" });
    },
  };
}

/** Writes the licences of the packages that the page contains, which ask to go along with every copy. */
function licences(): Plugin {
  const { dependencies } = JSON.parse(readFileSync(join(HERE, "package.json"), "utf-8")) as {
    dependencies: Record<string, string>;
  };
  const text = Object.entries(dependencies).map(([name, version]) => {
    const licence = readFileSync(join(HERE, "node_modules", name, "LICENSE"), "utf-8").trim();
    return `${name} ${version}\n\n${licence}\n`;
  });
  return {
    name: "licences",
    generateBundle() {
      this.emitFile({ type: "asset", fileName: "THIRD_PARTY_LICENSES.txt", source: text.join("\n\n") });
    },
  };
}

export default defineConfig({
  base: "./",
  plugins: [licences(), record()],
  build: {
    outDir: join(HERE, "../../src/trew/view/page"),
    emptyOutDir: true,
    assetsInlineLimit: 0,
    modulePreload: false,
    target: "es2022",
    rollupOptions: {
      output: { entryFileNames: "app.js", assetFileNames: "[name][extname]" },
    },
  },
});
