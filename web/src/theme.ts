// Light and dark: as the system says, until the switch says otherwise.

type Theme = "light" | "dark";
const KEY = "torpor-view-theme";
const listeners: (() => void)[] = [];
const system = matchMedia("(prefers-color-scheme: dark)");

function remembered(): Theme | null {
  try {
    const found = localStorage.getItem(KEY);
    return found === "light" || found === "dark" ? found : null;
  } catch {
    return null; // a file may not store anything
  }
}

function remember(theme: Theme): void {
  try {
    localStorage.setItem(KEY, theme);
  } catch {
    // then it lasts as long as the page
  }
}

let chosen = remembered();

export function theme(): Theme {
  return chosen ?? (system.matches ? "dark" : "light");
}

export function onTheme(act: () => void): void {
  listeners.push(act);
}

/** A colour of the style sheet. */
export function colour(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function apply(control: HTMLButtonElement): void {
  document.documentElement.dataset.theme = theme();
  const other = theme() === "dark" ? "light" : "dark";
  control.textContent = other === "dark" ? "Dark" : "Light";
  control.setAttribute("aria-label", `Switch to ${other} colours`);
  for (const act of listeners) act();
}

export function installTheme(control: HTMLButtonElement): void {
  control.addEventListener("click", () => {
    chosen = theme() === "dark" ? "light" : "dark";
    remember(chosen);
    apply(control);
  });
  system.addEventListener("change", () => apply(control));
  apply(control);
}
