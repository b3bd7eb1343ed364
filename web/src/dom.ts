// Small makers of elements. Text is always text: nothing here reads markup.

export type Child = Node | string | null | undefined;
type Attributes = Record<string, string | number | boolean | EventListener>;

/** An element; attributes that begin with "on" are listeners, false ones are left out. */
export function el<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false) made.setAttribute(name, String(value));
  }
  append(made, children);
  return made;
}

export function append(parent: Element, children: Child[]): void {
  for (const child of children) {
    if (child !== null && child !== undefined) parent.append(child);
  }
}

export function fill(parent: Element, ...children: Child[]): void {
  parent.replaceChildren();
  append(parent, children);
}

export function button(text: string, act: () => void, label = ""): HTMLButtonElement {
  const made = el("button", { type: "button", onclick: act }, text);
  if (label) {
    made.setAttribute("aria-label", label);
    made.title = label;
  }
  return made;
}

/** A choice with its label in front of it. */
export function choice(label: string, act: (value: string) => void): [HTMLElement, HTMLSelectElement] {
  const select = el("select", { onchange: () => act(select.value) });
  return [el("label", { class: "choice" }, el("span", {}, label), select), select];
}

export function setOptions(select: HTMLSelectElement, options: [string, string][]): void {
  const before = select.value;
  fill(select, ...options.map(([value, text]) => el("option", { value }, text)));
  if (options.some(([value]) => value === before)) select.value = before;
}

let serial = 0;
export function freshId(stem: string): string {
  return `${stem}-${++serial}`;
}
