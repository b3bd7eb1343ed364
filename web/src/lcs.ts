// The shortest way from one list to another (Myers), for lists that are mostly alike.

export interface Change {
  kind: "+" | "-" | "=";
  a: number;
  b: number;
}

const MOST_EDITS = 3000; // more than this and the middle counts as replaced

export function changes(one: string[], other: string[]): Change[] {
  let start = 0;
  while (start < one.length && start < other.length && one[start] === other[start]) start++;
  let endA = one.length, endB = other.length;
  while (endA > start && endB > start && one[endA - 1] === other[endB - 1]) {
    endA--;
    endB--;
  }
  const found: Change[] = [];
  for (let i = 0; i < start; i++) found.push({ kind: "=", a: i, b: i });
  found.push(...middle(one.slice(start, endA), other.slice(start, endB)).map((c) => ({ kind: c.kind, a: c.a + start, b: c.b + start })));
  for (let i = 0; endA + i < one.length; i++) found.push({ kind: "=", a: endA + i, b: endB + i });
  return found;
}

function middle(one: string[], other: string[]): Change[] {
  const n = one.length, m = other.length, most = Math.min(n + m, MOST_EDITS);
  const reach = new Int32Array(2 * most + 3), zero = most + 1;
  const trail: Int32Array[] = [];
  for (let edits = 0; edits <= most; edits++) {
    trail.push(reach.slice(zero - edits - 1, zero + edits + 2));
    for (let k = -edits; k <= edits; k += 2) {
      const down = k === -edits || (k !== edits && reach[zero + k - 1] < reach[zero + k + 1]);
      let x = down ? reach[zero + k + 1] : reach[zero + k - 1] + 1;
      let y = x - k;
      while (x < n && y < m && one[x] === other[y]) {
        x++;
        y++;
      }
      reach[zero + k] = x;
      if (x >= n && y >= m) return walkBack(trail, n, m);
    }
  }
  return [...one.map((_, a): Change => ({ kind: "-", a, b: 0 })), ...other.map((_, b): Change => ({ kind: "+", a: 0, b }))];
}

function walkBack(trail: Int32Array[], n: number, m: number): Change[] {
  const found: Change[] = [];
  let x = n, y = m;
  for (let edits = trail.length - 1; edits >= 0; edits--) {
    const reach = trail[edits], zero = edits + 1, k = x - y;
    const down = k === -edits || (k !== edits && reach[zero + k - 1] < reach[zero + k + 1]);
    const fromX = down ? reach[zero + k + 1] : reach[zero + k - 1];
    const fromY = fromX - (down ? k + 1 : k - 1);
    while (x > fromX && y > fromY) found.push({ kind: "=", a: --x, b: --y });
    if (edits > 0) found.push(down ? { kind: "+", a: x, b: --y } : { kind: "-", a: --x, b: y });
  }
  return found.reverse();
}
