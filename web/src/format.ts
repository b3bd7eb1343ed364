// Numbers for people.

export function bytes(count: number): string {
  return scaled(count, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
}

export function flops(count: number): string {
  return scaled(count, 1000, ["", "k", "M", "G", "T", "P"]);
}

function scaled(count: number, step: number, units: string[]): string {
  let unit = 0;
  while (Math.abs(count) >= step && unit < units.length - 1) {
    count /= step;
    unit++;
  }
  const digits = unit === 0 || count >= 100 ? 0 : count >= 10 ? 1 : 2;
  return `${count.toFixed(digits)} ${units[unit]}`.trim();
}

export function seconds(value: number): string {
  if (value === 0) return "0";
  if (value < 1e-3) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.1 ? 2 : 1)} ms`;
  return `${value.toFixed(2)} s`;
}

/** A time on an axis: no more digits than it has. */
export function tick(value: number): string {
  const plain = (scaled: number, unit: string) => `${Number(scaled.toPrecision(6))} ${unit}`;
  if (value === 0) return "0";
  if (Math.abs(value) < 1e-3) return plain(value * 1e6, "µs");
  return Math.abs(value) < 1 ? plain(value * 1e3, "ms") : plain(value, "s");
}

export function count(value: number): string {
  return value.toLocaleString("en-US");
}

/** `aten.add.Tensor` -> `add`; the names of others keep their namespace. */
export function shortOp(op: string): string {
  const parts = op.split(".");
  if (parts.length < 2) return op;
  return parts[0] === "aten" ? parts[1] : `${parts[0]}.${parts[1]}`;
}

/** `float32[8,48] stride [1,8] @lazy:0` -> `float32[8,48]` */
export function shortType(type: string): string {
  return type.replace(/ (stride \[[^\]]*\]|offset \S+)| conj| neg| @[\w:]+/g, "");
}

export function shortened(text: string, longest: number): string {
  return text.length <= longest ? text : `${text.slice(0, longest - 1)}…`;
}

/** Long lists in brackets, by their beginnings: `[%1, %2, … 34 items]`. */
export function shortLists(text: string): string {
  return text.replace(/\[([^[\]]*)\]/g, (whole, inside: string) => {
    const items = inside.split(", ");
    return items.length > 6 ? `[${items.slice(0, 2).join(", ")}, … ${items.length} items]` : whole;
  });
}
