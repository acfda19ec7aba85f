// Bundles the page into one file with its policy: no script or style but its own runs in it.
import { createHash } from "node:crypto";
import { mkdirSync, readFileSync, readdirSync, writeFileSync } from "node:fs";
import { build } from "esbuild";

const options = { bundle: true, target: ["chrome109", "firefox115", "safari16"], charset: "utf8", legalComments: "inline", write: false };

if (process.argv.includes("--tests")) {
  const tests = readdirSync("test").filter(name => name.endsWith(".test.ts")).map(name => `test/${name}`);
  await build({ ...options, target: "node18", entryPoints: tests, platform: "node", format: "esm", outdir: "target/tests", outExtension: { ".js": ".mjs" }, write: true });
  process.exit(0);
}

const text = async entry => {
  const made = await build({ ...options, entryPoints: [entry], minify: true, format: "iife" });
  // Nothing in it may end the element that it is in.
  return made.outputFiles[0].text.replaceAll("</script", "<\\/script").replaceAll("</style", "<\\/style").trimEnd();
};
const hash = code => `'sha256-${createHash("sha256").update(code).digest("base64")}'`;
const script = await text("src/main.ts"), style = await text("src/style.css");
const policy = `default-src 'none'; script-src ${hash(script)}; style-src ${hash(style)}; img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'`;
const page = readFileSync("src/page.html", "utf8")
  .replace("@POLICY@", () => policy)
  .replace("@STYLE@", () => style)
  .replace("@SCRIPT@", () => script);
mkdirSync("dist", { recursive: true });
writeFileSync(process.argv[2] ?? "dist/page.html", page);
console.log(`${page.length} bytes`);
