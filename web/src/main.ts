// The page: one profile in this file, or what a server sends.

import { App } from "./app.ts";
import { byId, painted } from "./dom.ts";
import type { StaticData } from "./model.ts";

const box = byId("data"), app = new App();
performance.mark("heapbpf-begin");
if (!box.hasChildNodes()) void app.serve();
else {
  // A large profile takes long to read: the head of the page comes first.
  void painted().then(() => {
    const text = box.textContent ?? "";
    box.remove();
    return app.open(JSON.parse(text) as StaticData, text);
  });
}
