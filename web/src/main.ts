// The page: one profile in this file, or what a server sends.

import { App } from "./app.ts";
import { byId } from "./dom.ts";
import type { StaticData } from "./model.ts";

const box = byId("data"), text = box.textContent ?? "";
box.remove();
const app = new App();
performance.mark("heapbpf-begin");
if (text.trim() === "") void app.serve();
else void app.open(JSON.parse(text) as StaticData, text);
