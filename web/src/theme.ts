// Light or dark.

import { byId } from "./dom.ts";

/** Light or dark: as the system has it, or as it was chosen here. */
export function theme(changed: () => void) {
  const system = matchMedia("(prefers-color-scheme: dark)"), box = byId("theme");
  let chosen: string | null = null;
  try {
    chosen = localStorage.getItem("heapbpf-theme");
  } catch {
    // A page from a file may have no storage.
  }
  const apply = () => {
    const dark = chosen ? chosen === "dark" : system.matches;
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    box.textContent = dark ? "Light" : "Dark";
  };
  const again = () => {
    apply();
    changed();
  };
  apply();
  system.addEventListener("change", again);
  box.addEventListener("click", () => {
    chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try {
      localStorage.setItem("heapbpf-theme", chosen);
    } catch {
      // Then it is chosen for this view alone.
    }
    again();
  });
}
