// Elements. Text from elsewhere only ever becomes text.

type Child = Node | string | null;

/** The element with this id. */
export function byId<T extends HTMLElement = HTMLElement>(id: string): T {
  const found = document.getElementById(id);
  if (!found) throw new Error(`no element ${id}`);
  return found as T;
}

/** A new element with attributes and children. */
export function element<K extends keyof HTMLElementTagNameMap>(
  tag: K, attributes: Record<string, string> = {}, ...children: Child[]
): HTMLElementTagNameMap[K] {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.filter(child => child !== null));
  return made;
}

const ROLES = { table: "table", thead: "rowgroup", tbody: "rowgroup", tr: "row", th: "columnheader", td: "cell" } as const;

/** A table or a part of one. It has its role, because browsers forget it where a style shows a row as a paragraph. */
export function part<K extends keyof typeof ROLES>(tag: K, attributes: Record<string, string> = {}, ...children: Child[]): HTMLElementTagNameMap[K] {
  return element(tag, { role: ROLES[tag], ...attributes }, ...children);
}

const SVG = "http://www.w3.org/2000/svg";

/** A new element of a drawing. */
export function drawing(tag: string, attributes: Record<string, string | number> = {}, ...children: Child[]): SVGElement {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, String(value));
  made.append(...children.filter(child => child !== null));
  return made;
}

/** A button that does something. */
export function button(text: string, act: () => void, attributes: Record<string, string> = {}): HTMLButtonElement {
  const made = element("button", { type: "button", ...attributes }, text);
  made.addEventListener("click", act);
  return made;
}

/** Replaces what is in an element. What has the focus or was scrolled stays so, as far as it is there again. */
export function renew(box: HTMLElement, ...children: (Node | string)[]) {
  const places = () => Array.from(box.querySelectorAll<HTMLElement>("a, button, input, select, [tabindex]"));
  const before = places(), focused = before.findIndex(it => it === document.activeElement), name = before[focused]?.textContent;
  const scrolled = before.map(it => it.scrollTop);
  box.replaceChildren(...children);
  const after = places();
  scrolled.forEach((top, i) => { if (top && after[i]) after[i].scrollTop = top; });
  if (focused < 0) return;
  // The same button may be in another row by now.
  (after.find(it => it.textContent === name) ?? after[focused])?.focus({ preventScroll: true });
}

/** Lets the browser paint before the work goes on. What nobody sees is not painted. */
export function painted(): Promise<void> {
  return document.hidden ? pause() : new Promise(resolve => requestAnimationFrame(() => void pause().then(resolve)));
}

/** Lets the browser react before the work goes on. */
export function pause(): Promise<void> {
  return new Promise(resolve => {
    const channel = new MessageChannel();
    channel.port1.onmessage = () => resolve();
    channel.port2.postMessage(0);
  });
}

/** Gives a file to the user. */
export function save(name: string, content: BlobPart, type: string) {
  const url = URL.createObjectURL(new Blob([content], { type }));
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** What went wrong, above all else; empty: nothing. */
export function banner(text: string) {
  const box = byId("banner");
  box.hidden = text === "";
  if (box.textContent !== text) box.textContent = text;
}
