// The layout, by the same rules as coordinates.py: sizes of boxes from the inside out, then positions, then lines.

// -- sizes: [width, height, axis]
const stacked = (sizes) => {
  const axis = Math.max(...sizes.map((s) => s[2]));
  return [axis + Math.max(...sizes.map((s) => s[0] - s[2])), sizes.reduce((h, s) => h + s[1], 0) + Z.GAP * (sizes.length - 1), axis];
};

const beside = (sizes, gap) => {
  const width = sizes.reduce((w, s) => w + s[0], 0) + gap * (sizes.length - 1), half = sizes.length >> 1;
  const middle = sizes.length % 2 ? sizes.slice(0, half).reduce((w, s) => w + s[0] + gap, 0) + sizes[half][2] : width / 2;
  return [width, Math.max(...sizes.map((s) => s[1])), middle];
};

function size(given) {
  const shape = shown(given);
  if (!shape.box || !opened.has(shape.key)) return shape.closed;
  const [w, h, axis] = boxSize(shape, shape.box);
  return [Math.max(w + 2 * Z.PAD, shape.head) + Z.RAIL * (shape.rails ?? 0), Z.HEAD + Z.GAP + h + Z.GAP, Z.PAD + axis];
}

let known = new Map(); // the sizes of the boxes of every open shape
function boxSize(shape, box) {
  if (typeof box === "number") return size(shape.inner[box]);
  let of = known.get(shape);
  if (!of) known.set(shape, of = new Map());
  if (!of.has(box)) of.set(box, measured(shape, box));
  return of.get(box);
}

function measured(shape, [kind, ...rest]) {
  if (kind === "|") return [Z.PASS, 0, Z.PASS / 2];
  if (kind === "c") return stacked(rest.map((b) => boxSize(shape, b)));
  if (kind === "r") {
    const [lanes, ...rows] = rest;
    const [w, h, axis] = stacked(rows.map((row) => beside(row.map((b) => boxSize(shape, b)), Z.APART / 2)));
    return [w, h + Z.ACROSS * lanes.reduce((a, b) => a + b, 0), axis];
  }
  const found = beside(rest.map((b) => boxSize(shape, b)), Z.APART);
  return kind === "p" ? [found[0] + Z.LANE, found[1], Z.LANE / 2] : found;
}

// -- positions
function placed(given, x, y) {
  const shape = shown(given), [width, height, axis] = size(given);
  const made = { shape, x, y, width, height, axis: x + axis, bottom: y + height, open: !!shape.box && opened.has(shape.key), inner: [], wires: [] };
  if (made.open) {
    const inside = { shape, spots: {}, spans: {}, tops: {}, rooms: {} };
    put(inside, shape.box, x + Z.PAD, y + Z.HEAD + Z.GAP, []);
    made.inner = shape.inner.map((_, i) => inside.spots[i]);
    made.wires = wires(made, inside);
  }
  return made;
}

function put(inside, box, x, y, path) {
  const shape = inside.shape;
  if (typeof box === "number") { inside.spots[box] = placed(shape.inner[box], x, y); return; }
  const [kind, ...rest] = box, [, height, axis] = boxSize(shape, box);
  inside.spans[path] = [y, y + height];
  if (kind === "c") {
    rest.forEach((b, i) => {
      const [, h, a] = boxSize(shape, b);
      put(inside, b, x + axis - a, y, [...path, i]);
      y += h + Z.GAP;
    });
  } else if (kind !== "r") {
    x += kind === "p" ? Z.LANE : 0;
    rest.forEach((b, i) => { put(inside, b, x, y, [...path, i]); x += boxSize(shape, b)[0] + Z.APART; });
  } else {
    const [lanes, ...rows] = rest, tops = inside.tops[path] = [];
    rows.forEach((row, r) => {
      y += Z.ACROSS * lanes[r];
      tops.push(y);
      const sizes = row.map((b) => boxSize(shape, b)), whole = beside(sizes, Z.APART / 2);
      let left = x + axis - whole[2];
      row.forEach((b, c) => {
        if (b[0] === "|") inside.rooms[[b[1], b[2], r]] = left + sizes[c][2];
        else put(inside, b, left, y, [...path, r, c]);
        left += sizes[c][0] + Z.APART / 2;
      });
      y += whole[1] + Z.GAP;
    });
    tops.push(y + Z.ACROSS * lanes.at(-1));
  }
}

// -- lines
function wires(around, inside) {
  const shifts = arrivals(around, inside), lower = lanes(around, inside, shifts);
  return inside.shape.wires.map(([source, target, values, bend, region, rows]) => {
    const a = inside.spots[source], b = inside.spots[target], lane = lower[[source, target]] ?? 0;
    const start = a ? [a.axis, a.bottom] : [around.axis, around.y + Z.HEAD];
    const shift = shifts[[source, target]] ?? 0, end = b ? [b.axis + shift, b.y] : [around.axis + shift, around.bottom];
    if (b?.shape.symbol) end[1] += b.height / 2 - Math.sqrt(b.height ** 2 / 4 - (end[0] - b.axis) ** 2);
    const points = bend === "rail" ? rail(around, b, region[0])
      : bend === "merge" && besideCircle(start[0], b) ? intoCircle(start, b, lane * Z.BESIDE)
        : bent([source, target, bend, region, rows], start, end, inside, lane * Z.OVER);
    return { source: a && a.shape, target: b && b.shape, values, points: corners(points) };
  });
}

function rail(around, target, lane) {
  const inward = around.shape.rails - 1 - lane;
  const x = around.x + around.width - Z.PAD / 2 - Z.RAIL * lane, y = target.y + Z.PORT + Z.ACROSS * inward;
  return [[x, around.y + Z.HEAD], [x, y], [target.x + target.width, y]];
}

const besideCircle = (x, target) => !!target?.shape.symbol && Math.abs(x - target.axis) > 1;

function intoCircle(start, circle, lower) {
  const y = (circle.y + circle.bottom) / 2 + lower, across = Math.sqrt((circle.height / 2) ** 2 - lower ** 2);
  return [start, [start[0], y], [circle.axis + (start[0] > circle.axis ? across : -across), y]];
}

// Returns the vertical offset of each "merge" line, −1 to 1: of lines from the same side, the farthest is the lowest.
function lanes(around, inside, shifts) {
  const found = new Map(), made = {};
  for (const [source, target, , bend, region] of inside.shape.wires) {
    const a = inside.spots[source], b = inside.spots[target] ?? around;
    if (!a || bend !== "merge") continue;
    const circle = besideCircle(a.axis, b), way = b.axis + (circle ? 0 : shifts[[source, target]]) - a.axis;
    const key = [target, circle ? 0 : Math.round(inside.spans[region][1]), way > 0].join();
    if (Math.abs(way) > 0.5) found.set(key, [...(found.get(key) ?? []), [-Math.abs(way), source, target]]);
  }
  for (const lines of found.values()) {
    const half = (lines.length - 1) / 2;
    lines.sort((p, q) => p[0] - q[0] || p[1] - q[1]).forEach(([, source, target], i) => { made[[source, target]] = (half - i) / Math.max(1, half); });
  }
  return made;
}

function bent([source, target, bend, region, rows], start, end, inside, lower) {
  if (bend === "rows") {
    const points = [start];
    let x = start[0];
    for (const [r, lane] of rows) {
      const y = inside.tops[region][r] - Z.ACROSS * (lane + 1), to = inside.rooms[[source, target, r]] ?? end[0];
      points.push([x, y], [to, y]);
      x = to;
    }
    return [...points, end];
  }
  if (!bend) return [start, end];
  const [top, bottom] = inside.spans[region], y = bend === "fork" ? top - Z.GAP / 2 : bottom + Z.GAP / 2 + lower;
  return [start, [start[0], y], [end[0], y], end];
}

function arrivals(around, inside) {
  const found = {}, arriving = new Map();
  for (const [s, t, , bend] of inside.shape.wires) {
    if (bend === "rail") continue;
    found[[s, t]] = 0;
    if (!inside.spots[t]?.shape.symbol || bend === "rows") arriving.set(t, [...(arriving.get(t) ?? []), [s, bend]]);
  }
  for (const [target, coming] of arriving) {
    const spot = inside.spots[target] ?? around;
    if (coming.length < 2) continue;
    const column = new Map(coming.map(([s, bend]) => [s, (bend === "fork" ? spot : inside.spots[s] ?? around).axis])), at = (s) => column.get(s);
    const order = [...column.keys()].sort((a, b) => at(a) - at(b));
    const straight = order.findIndex((s) => Math.abs(at(s) - spot.axis) < 0.5);
    const zero = straight < 0 ? (order.length - 1) / 2 : straight;
    const room = Math.min(spot.axis - spot.x, spot.x + spot.width - spot.axis) - (spot.shape.symbol ? Z.BESIDE : Z.EDGE);
    const step = Math.min(Z.SPREAD, room / Math.max(zero, order.length - 1 - zero));
    order.forEach((s, i) => { found[[s, target]] = (i - zero) * step; });
  }
  return found;
}

const near = (p, q) => Math.abs(p[0] - q[0]) < 0.01 && Math.abs(p[1] - q[1]) < 0.01;
function corners(points) {
  const apart = points.filter((p, i) => i === points.length - 1 || !near(p, points[i + 1]));
  return apart.filter((p, i) => !i || i === apart.length - 1 ||
    ![0, 1].some((k) => Math.abs(apart[i - 1][k] - p[k]) < 0.01 && Math.abs(p[k] - apart[i + 1][k]) < 0.01));
}
