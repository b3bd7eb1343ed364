// Builds the page into the package: one script, one style sheet, one HTML file, the notices.
import { build } from "esbuild";
import { copyFile, mkdir, readFile, rm, writeFile } from "node:fs/promises";

const out = new URL("../src/torpor/debug/view/page/", import.meta.url);
await mkdir(out, { recursive: true });

await build({
  entryPoints: { app: "src/main.ts" },
  outdir: out.pathname,
  bundle: true,
  minify: true,
  format: "iife",
  target: "es2022",
  charset: "utf8",
  legalComments: "external", // they go into NOTICES.txt
});
await copyFile("src/index.html", new URL("index.html", out));

const libraries = ["cytoscape", "@dagrejs/dagre", "@dagrejs/graphlib", "uplot"];
const notices = [];
for (const name of libraries) {
  const { version, license, homepage } = JSON.parse(
    await readFile(`node_modules/${name}/package.json`, "utf8"),
  );
  const text = await readFile(`node_modules/${name}/LICENSE`, "utf8");
  notices.push(`${name} ${version} (${license})\n${homepage ?? ""}\n\n${text.trim()}\n`);
}
for (const name of ["app.js", "app.css"]) {
  const file = new URL(`${name}.LEGAL.txt`, out);
  const text = await readFile(file, "utf8").catch(() => "");
  if (text.trim()) notices.push(`What they hold themselves, in ${name}\n\n${text.trim()}\n`);
  await rm(file, { force: true });
}
const head = "The page of `torpor view` holds these libraries.\n";
const line = `\n${"-".repeat(80)}\n\n`;
await writeFile(new URL("NOTICES.txt", out), [head, ...notices].join(line));
