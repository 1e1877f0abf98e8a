// Draws the charts of kvtrace's page from the JSON inside it. Everything of the run is text: it is set as
// textContent or drawn on a canvas, and never becomes markup.
"use strict";
(function () {
  const data = JSON.parse(document.getElementById("kvtrace-picture").textContent);
  const kinds = data.kinds; // [letter, label, why]
  const FAULTS = "ELXG";
  const QUIET = "don-";
  const ORDER = "SRDPIiW?";
  const LEAST = 0.5; // of a cell's height, for a fault in it
  const MOST = 0.25; // what quiet steps take beside others
  const charts = [];
  const token = (letter) => ({ "?": "Q", "-": "A" })[letter] || letter;
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const dark = (letter) => "ELSGI".includes(letter) ? "#ffffff" : letter === "d" || letter === "D" || letter === "o" || letter === "n" || letter === "-" ? color("text") : "#101010";
  const label = (kind) => kinds[kind][1] + (kinds[kind][2] ? ": " + kinds[kind][2] : "");
  const count = (n) => String(n).replace(/\B(?=(\d{3})+(?!\d))/g, " ");
  const many = (n, noun) => count(n) + " " + noun + (n === 1 ? "" : "s");
  const ms = (t) => t === 0 ? "0" : t >= 1000 ? (t / 1000).toFixed(t < 1e4 ? 2 : 1) + " s" : t.toFixed(t < 10 ? 2 : 0) + " ms";
  /** 0.001 -> "1 µs". */
  const span = (t) => t >= 1000 ? t / 1000 + " s" : t >= 1 ? t + " ms" : t >= 0.001 ? Math.round(t * 1e3) + " µs" : Math.round(t * 1e6) + " ns";
  /** The powers of ten around some times. */
  function decades(values) {
    const there = values.filter((value) => value > 0);
    if (!there.length) return [0.001, 1];
    const low = 10 ** Math.floor(Math.log10(Math.min(...there))), high = 10 ** Math.ceil(Math.log10(Math.max(...there)));
    return [low, Math.max(high, low * 10)];
  }
  const still = { animation: false, textStyle: { fontFamily: "inherit" } };

  function tip(text) {
    const box = document.createElement("div");
    box.style.cssText = "white-space:pre-line;max-width:min(420px,80vw);overflow-wrap:anywhere;font-size:13px;line-height:1.4";
    box.textContent = text;
    return box;
  }
  const tooltip = (formatter) => ({
    confine: true, backgroundColor: color("page"), borderColor: color("line"), textStyle: { color: color("text") },
    formatter: (item) => { const text = formatter(item); return text ? tip(text) : ""; },
  });
  const axis = (more) => Object.assign({
    axisLine: { onZero: false, lineStyle: { color: color("line") } }, axisTick: { lineStyle: { color: color("line") } },
    axisLabel: { color: color("dim") }, splitLine: { show: false }, nameTextStyle: { color: color("dim") },
  }, more);
  const slider = (more) => Object.assign({
    type: "slider", height: 18, bottom: 4, borderColor: color("line"), fillerColor: color("line"), showDetail: false,
    brushSelect: false, backgroundColor: color("soft"), dataBackground: { lineStyle: { opacity: 0 }, areaStyle: { opacity: 0 } },
  }, more);

  function place(box, renderer, height) {
    box.style.height = height + "px";
    const chart = kvCharts.init(box, null, { renderer });
    charts.push(chart);
    return chart;
  }

  // ---------------------------------------------------------------------------- layers x steps

  /** "model.layers.7.self_attn.attn" -> "7" where that tells the layers apart. */
  function shortNames(names) {
    const numbers = names.map((name) => (name.match(/\d+/g) || []).join("."));
    return numbers.every(Boolean) && new Set(numbers).size === names.length ? numbers : names;
  }

  function cellsOf(map) {
    const found = []; // [from, to, layer, mix]
    map.row_of.forEach((row, layer) => {
      let at = 0;
      const runs = map.rows[row];
      for (let i = 0; i < runs.length; i += 2) {
        found.push([at, at + runs[i], layer, runs[i + 1]]);
        at += runs[i];
      }
    });
    return found;
  }

  function mixAt(map, column, layer) {
    const runs = map.rows[map.row_of[layer]];
    let at = 0;
    for (let i = 0; i < runs.length; i += 2) {
      at += runs[i];
      if (column < at) return map.mixes[runs[i + 1]];
    }
    return [];
  }

  const stepsIn = (map, column) => Math.min(map.per, map.total - column * map.per);

  function stepsText(map, column) {
    const [first, last, n] = [map.first[column], map.last[column], stepsIn(map, column)];
    return first === last ? "step " + count(first) : "steps " + count(first) + " to " + count(last) + " (" + count(n) + ")";
  }

  function cellText(map, column, layer) {
    const mix = mixAt(map, column, layer), lines = [stepsText(map, column) + ", " + map.layers[layer]];
    const total = stepsIn(map, column);
    for (let i = 0; i < mix.length; i += 2) {
      lines.push((total > 1 ? count(mix[i + 1]) + " of " + count(total) + ": " : "") + label(mix[i]));
    }
    const tokens = [];
    if (map.prompt[column]) tokens.push(many(map.prompt[column], "prompt token"));
    if (map.decode[column]) tokens.push(many(map.decode[column], "decode token"));
    if (map.forward_ms[column]) {
      tokens.push(ms(map.forward_ms[column]) + " a step, " + ms(map.hooks_ms[column]) + " of it in hooks");
    }
    if (tokens.length) lines.push(tokens.join(", "));
    return lines.join("\n");
  }

  /** [letter, share of the height], the worst at the bottom; a fault never gets too thin to see. */
  function portions(mix) {
    let total = 0;
    const parts = [];
    for (let i = 0; i < mix.length; i += 2) {
      const letter = kinds[mix[i]][0], same = parts.find((one) => one[0] === letter);
      if (same) same[1] += mix[i + 1]; else parts.push([letter, mix[i + 1]]);
      total += mix[i + 1];
    }
    // Decode steps outnumber all others in a long run: beside others they take little room
    const quiet = parts.filter((part) => QUIET.includes(part[0])).reduce((before, part) => before + part[1], 0);
    const busy = total - quiet, room = busy ? Math.min(quiet / total, MOST) : 1;
    for (const part of parts) {
      part[1] = QUIET.includes(part[0]) ? part[1] / quiet * room : part[1] / busy * (1 - room);
      if (FAULTS.includes(part[0])) part[1] = Math.max(part[1], LEAST);
    }
    const sum = parts.reduce((before, part) => before + part[1], 0);
    parts.forEach((part) => { part[1] /= sum; });
    const place = (letter) => QUIET.includes(letter) ? 0 : FAULTS.includes(letter) ? 9 : 1 + ORDER.indexOf(letter);
    return parts.sort((a, b) => place(a[0]) - place(b[0]));
  }

  function heatMap(figure) {
    const map = data.maps[Number(figure.dataset.map)], box = figure.querySelector(".chart");
    const readout = figure.querySelector(".readout");
    const columns = map.first.length, layers = map.layers.length, names = shortNames(map.layers);
    const narrow = box.clientWidth < 560;
    const row = Math.max(5, Math.min(26, Math.floor(640 / layers)));
    const timed = map.forward_ms.some(Boolean), below = timed ? 96 : 0;
    const chart = place(box, "canvas", layers * row + 74 + below);
    const cells = cellsOf(map), mixes = map.mixes.map(portions);
    let cursor = null;
    const left = narrow ? 40 : 74;

    function drawCell(params, api) {
      const cell = cells[params.dataIndex];
      const start = api.coord([cell[0], cell[2]]), end = api.coord([cell[1], cell[2]]);
      const high = api.size([0, 1])[1], gap = high > 9 ? 1 : 0, area = params.coordSys;
      const x0 = Math.max(start[0], area.x), x1 = Math.min(end[0], area.x + area.width);
      if (x1 <= x0) return null;
      const one = (end[0] - start[0]) / (cell[1] - cell[0]), top = start[1] - high / 2, tall = high - gap;
      const children = [];
      let y = top;
      for (const [letter, share] of mixes[cell[3]]) {
        children.push({ type: "rect", shape: { x: x0, y, width: x1 - x0 + (one < 3 ? 0.4 : 0), height: tall * share }, style: { fill: color2(letter) } });
        y += tall * share;
      }
      if (one >= 13 && tall >= 11 && mixes[cell[3]].length === 1 && mixes[cell[3]][0][0] !== "-") {
        const letter = mixes[cell[3]][0][0];
        for (let at = cell[0]; at < cell[1] && cell[1] - cell[0] < 200; at++) {
          const x = api.coord([at + 0.5, cell[2]])[0];
          if (x < area.x + 4 || x > area.x + area.width - 4) continue;
          children.push({ type: "text", silent: true, style: { text: letter, x, y: top + tall / 2, fill: dark(letter), font: "600 11px sans-serif", align: "center", verticalAlign: "middle" } });
        }
      }
      if (one >= 5) {
        for (let at = cell[0] + 1; at <= cell[1] && cell[1] - cell[0] < 400; at++) {
          const x = api.coord([at, cell[2]])[0];
          if (x > x0 && x <= x1) children.push({ type: "rect", silent: true, shape: { x: x - 0.5, y: top, width: 1, height: tall }, style: { fill: color2("page") } });
        }
      }
      return { type: "group", children };
    }
    let palette = {};
    const color2 = (name) => palette[name] || (palette[name] = color(token(name)));

    function drawCursor(params, api) {
      if (!cursor) return null;
      const start = api.coord([cursor[0], cursor[1]]), end = api.coord([cursor[0] + 1, cursor[1]]), high = api.size([0, 1])[1];
      return { type: "rect", silent: true, z2: 20, shape: { x: start[0], y: start[1] - high / 2, width: Math.max(3, end[0] - start[0]), height: high }, style: { fill: "none", stroke: color("text"), lineWidth: 2.5 } };
    }

    const atPoint = (x, y) => {
      const [column, layer] = chart.convertFromPixel({ gridIndex: 0 }, [x, y]);
      return [Math.max(0, Math.min(columns - 1, Math.floor(column))), Math.max(0, Math.min(layers - 1, Math.round(layer)))];
    };
    let pointer = [0, 0];
    chart.getZr().on("mousemove", (event) => { pointer = [event.offsetX, event.offsetY]; });
    chart.getZr().on("click", (event) => {
      if (chart.containPixel({ gridIndex: 0 }, [event.offsetX, event.offsetY])) move(...atPoint(event.offsetX, event.offsetY));
    });

    function draw() {
      palette = {};
      const [lowest, highest] = decades([...map.forward_ms, ...map.hooks_ms]);
      const time = timed ? [
        axis({ type: "value", gridIndex: 1, min: 0, max: columns, show: false }),
        axis({ type: "log", gridIndex: 1, min: lowest, max: highest, axisTick: { show: false }, axisLine: { show: false }, splitLine: { show: true, lineStyle: { color: color("line"), opacity: 0.6 } }, axisLabel: { color: color("dim"), fontSize: 11, hideOverlap: true, formatter: span } }),
      ] : [];
      const step = (value) => { const at = Math.floor(value); return at >= columns || at !== value ? "" : String(map.first[at]); };
      const grids = [{ left, right: 12, top: 8, height: layers * row, outerBoundsMode: "none" }];
      if (timed) grids.push({ left, right: 12, top: 8 + layers * row + 40, height: 64, outerBoundsMode: "none" });
      const bars = (values, fill, name) => ({
        type: "custom", xAxisIndex: 1, yAxisIndex: 1, name, silent: true, clip: true,
        encode: { x: 0, y: 1 }, data: values.map((value, at) => [at, value]),
        renderItem: (params, api) => {
          if (!(api.value(1) > 0)) return null;
          const low = api.coord([api.value(0), lowest]), high = api.coord([api.value(0) + 1, api.value(1)]);
          return { type: "rect", shape: { x: low[0], y: high[1], width: Math.max(0.8, high[0] - low[0] - (high[0] - low[0] > 4 ? 1 : 0)), height: Math.max(0, low[1] - high[1]) }, style: { fill } };
        },
      });
      chart.setOption(Object.assign({}, still, {
        aria: { enabled: false },
        grid: grids,
        tooltip: tooltip(() => { const [column, layer] = atPoint(...pointer); return cellText(map, column, layer); }),
        xAxis: [axis({ type: "value", min: 0, max: columns, minInterval: 1, position: "bottom", axisLabel: { color: color("dim"), formatter: step, hideOverlap: true }, name: "step", nameLocation: "start", nameGap: 8, nameTextStyle: { color: color("dim"), verticalAlign: "top", padding: [7, 0, 0, 0] } }), ...time.slice(0, 1)],
        yAxis: [axis({ type: "value", min: -0.5, max: layers - 0.5, inverse: true, interval: 1, axisTick: { show: false }, axisLine: { show: false }, axisLabel: { show: false } }), ...time.slice(1)],
        dataZoom: [
          { type: "inside", xAxisIndex: timed ? [0, 1] : [0], filterMode: "none", zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false, minValueSpan: Math.min(columns, 8) },
          slider({ xAxisIndex: timed ? [0, 1] : [0], filterMode: "none", minValueSpan: Math.min(columns, 8) }),
        ],
        series: [
          { type: "custom", renderItem: drawCell, data: cells.map((cell) => [cell[0], cell[2], cell[1]]), encode: { x: [0, 2], y: 1 }, clip: true, progressive: 0 },
          { type: "custom", renderItem: drawCursor, data: cursor ? [[cursor[0], cursor[1]]] : [], silent: true, clip: false, tooltip: { show: false } },
          { type: "custom", silent: true, data: map.layers.map((_, at) => [0, at]), encode: { y: 1 }, renderItem: (params, api) => {
            const at = api.value(1), every = Math.ceil(13 / row);
            if (at % every) return null;
            const text = names[at].length > (narrow ? 4 : 9) ? "…" + names[at].slice(narrow ? -4 : -8) : names[at];
            return { type: "text", style: { text, x: left - 6, y: api.coord([0, at])[1], fill: color("dim"), font: "11px sans-serif", align: "right", verticalAlign: "middle" } };
          } },
          ...(timed ? [bars(map.forward_ms, color("line"), "step"), bars(map.hooks_ms, color("R"), "hooks")] : []),
        ],
        graphic: [],
      }), true);
    }

    function move(column, layer) {
      cursor = [Math.max(0, Math.min(columns - 1, column)), Math.max(0, Math.min(layers - 1, layer))];
      const zoom = chart.getOption().dataZoom[0], low = zoom.startValue, high = zoom.endValue;
      if (cursor[0] < low || cursor[0] + 1 > high) {
        const wide = high - low, from = Math.max(0, Math.min(columns - wide, cursor[0] - wide / 2));
        chart.dispatchAction({ type: "dataZoom", startValue: from, endValue: from + wide });
      }
      chart.setOption({ series: [{}, { data: [cursor] }] });
      readout.textContent = cellText(map, cursor[0], cursor[1]);
    }

    function zoom(factor) {
      const state = chart.getOption().dataZoom[0], wide = state.endValue - state.startValue;
      const middle = cursor ? cursor[0] + 0.5 : (state.startValue + state.endValue) / 2;
      const next = Math.max(Math.min(8, columns), Math.min(columns, wide * factor));
      const from = Math.max(0, Math.min(columns - next, middle - next / 2));
      chart.dispatchAction({ type: "dataZoom", startValue: from, endValue: from + next });
    }

    box.addEventListener("keydown", (event) => {
      const [column, layer] = cursor || [0, 0], page = Math.max(1, Math.round(columns / 10));
      const keys = {
        ArrowLeft: () => move(cursor ? column - 1 : 0, layer), ArrowRight: () => move(cursor ? column + 1 : 0, layer),
        ArrowUp: () => move(column, cursor ? layer - 1 : 0), ArrowDown: () => move(column, cursor ? layer + 1 : 0),
        Home: () => move(0, layer), End: () => move(columns - 1, layer),
        PageUp: () => move(column - page, layer), PageDown: () => move(column + page, layer),
        "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2),
        Escape: () => { cursor = null; chart.dispatchAction({ type: "dataZoom", start: 0, end: 100 }); chart.setOption({ series: [{}, { data: [] }] }); readout.textContent = readout.dataset.empty; },
      };
      if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
      event.preventDefault();
      keys[event.key]();
    });
    draw();
    return draw;
  }

  // ------------------------------------------------------------------------------- requests

  const SHAPES = {
    arrival: ["circle", "dim"], lookup: ["diamond", "R"], load: ["down", "R"], "load-done": ["down", "good"],
    save: ["up", "S"], "save-done": ["up", "good"], preempted: ["cross", "E"], finish: ["square", "text"],
  };

  function laneText(lane) {
    const lines = [lane.id + ", " + many(lane.prompt, "prompt token") + ", arrives at " + ms(lane.begin)];
    for (const bar of lane.bars) {
      lines.push("step " + bar.step + " (" + ms(bar.t0) + "): tokens " + bar.start + " to " + bar.end + ", " + label(bar.kind) + (bar.saved > 0 && bar.saved < 1 ? ", " + Math.round(bar.saved * 100) + " % saved" : ""));
    }
    for (const mark of lane.marks) if (mark.what !== "arrival") lines.push(ms(mark.t) + ": " + mark.text);
    if (lane.more) lines.push("and " + count(lane.more) + " more");
    return lines;
  }

  function shape(kind, x, y, fill) {
    const style = { fill, stroke: color("page"), lineWidth: 1 }, r = 5;
    const polygon = (points) => ({ type: "polygon", shape: { points: points.map(([a, b]) => [x + a * r, y + b * r]) }, style });
    if (kind === "circle") return { type: "circle", shape: { cx: x, cy: y, r: 4 }, style };
    if (kind === "square") return { type: "rect", shape: { x: x - 2, y: y - 6, width: 4, height: 12 }, style };
    if (kind === "diamond") return polygon([[0, -1.1], [1, 0], [0, 1.1], [-1, 0]]);
    if (kind === "up") return polygon([[0, -1], [1, 0.9], [-1, 0.9]]);
    if (kind === "down") return polygon([[0, 1], [1, -0.9], [-1, -0.9]]);
    return polygon([[-1, -0.5], [-0.5, -1], [0, -0.4], [0.5, -1], [1, -0.5], [0.4, 0], [1, 0.5], [0.5, 1], [0, 0.4], [-0.5, 1], [-1, 0.5], [-0.4, 0]]);
  }

  function lanes(figure) {
    const box = figure.querySelector(".chart"), readout = figure.querySelector(".readout"), rows = data.lanes;
    const last = Math.max(...rows.map((lane) => Math.max(lane.end || 0, ...lane.bars.map((bar) => bar.t1), ...lane.marks.map((mark) => mark.t)))) || 1;
    const row = 22, narrow = box.clientWidth < 560, left = narrow ? 64 : 110;
    const chart = place(box, "svg", rows.length * row + 84);
    let chosen = -1;
    const clip = (text, n) => text.length > n ? text.slice(0, n - 1) + "…" : text;

    function drawLane(params, api) {
      const lane = rows[params.dataIndex], y = api.coord([0, params.dataIndex])[1], area = params.coordSys;
      const x = (t) => api.coord([t, 0])[0], inside = (at) => at >= area.x - 1 && at <= area.x + area.width + 1;
      const cut = (at) => Math.max(area.x, Math.min(area.x + area.width, at));
      const children = [];
      if (params.dataIndex === chosen) children.push({ type: "rect", shape: { x: 0, y: y - row / 2, width: area.x + area.width, height: row }, style: { fill: color("soft") } });
      children.push({ type: "text", style: { text: clip(lane.id, narrow ? 9 : 16), x: area.x - 8, y, fill: color("dim"), font: "11px sans-serif", align: "right", verticalAlign: "middle" } });
      children.push({ type: "rect", shape: { x: cut(x(lane.begin)), y: y - 1, width: Math.max(0, cut(x(lane.end === null ? last : lane.end)) - cut(x(lane.begin))), height: 2 }, style: { fill: color("line") } });
      for (const bar of lane.bars) {
        const from = cut(x(bar.t0)), to = cut(x(bar.t1)), letter = kinds[bar.kind][0];
        if (x(bar.t1) < area.x || x(bar.t0) > area.x + area.width) continue;
        const wide = Math.max(3, to - from);
        children.push({ type: "rect", shape: { x: from, y: y - 7, width: wide, height: 14 }, style: { fill: color(token(letter)), stroke: color("page"), lineWidth: 0.5 } });
        if (bar.saved > 0 && bar.saved < 1) children.push({ type: "rect", shape: { x: from, y: y + 7 - 14 * bar.saved, width: wide, height: 14 * bar.saved }, style: { fill: color("S") } });
        if (wide > 16) children.push({ type: "text", style: { text: letter, x: from + wide / 2, y, fill: dark(letter), font: "600 10px sans-serif", align: "center", verticalAlign: "middle" } });
      }
      for (const mark of lane.marks) {
        const at = x(mark.t), [kind, name] = SHAPES[mark.what] || SHAPES.arrival;
        if (inside(at)) children.push(shape(kind, at, y, color(name)));
      }
      return { type: "group", children };
    }

    function draw() {
      chart.setOption(Object.assign({}, still, {
        aria: { enabled: false },
        grid: { left, right: 16, top: 8, bottom: 62, outerBoundsMode: "none" },
        tooltip: tooltip((item) => { const lines = laneText(rows[item.dataIndex]); return lines.length > 14 ? [...lines.slice(0, 13), "and " + (lines.length - 13) + " more: click"].join("\n") : lines.join("\n"); }),
        xAxis: axis({ type: "value", min: 0, max: last * 1.01, axisLabel: { color: color("dim"), formatter: ms, hideOverlap: true, showMaxLabel: false } }),
        yAxis: { type: "value", min: -0.5, max: rows.length - 0.5, inverse: true, show: false },
        dataZoom: [{ type: "inside", xAxisIndex: 0, filterMode: "none", zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false }, slider({ xAxisIndex: 0, filterMode: "none" })],
        series: [{ type: "custom", renderItem: drawLane, data: rows.map((lane, at) => [lane.begin, at, lane.end === null ? last : lane.end]), encode: { x: [0, 2], y: 1 } }],
      }), true);
    }
    function choose(at) {
      chosen = Math.max(0, Math.min(rows.length - 1, at));
      draw();
      readout.textContent = laneText(rows[chosen]).join("\n");
      const area = box.parentElement, y = 8 + chosen * row;
      if (y < area.scrollTop) area.scrollTop = y; else if (y + row > area.scrollTop + area.clientHeight) area.scrollTop = y + row - area.clientHeight;
    }
    chart.on("click", (item) => choose(item.dataIndex));
    box.addEventListener("keydown", (event) => {
      const keys = { ArrowDown: () => choose(chosen + 1), ArrowUp: () => choose(chosen - 1), Home: () => choose(0), End: () => choose(rows.length - 1) };
      if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
      event.preventDefault();
      keys[event.key]();
    });
    draw();
    return draw;
  }

  // ----------------------------------------------------------------------------- the page

  const draws = [];
  const MAKERS = [["figure[data-map]", heatMap], ["figure[data-lanes]", lanes]];
  for (const [selector, make] of MAKERS) document.querySelectorAll(selector).forEach((figure) => draws.push(make(figure)));
  const redraw = () => draws.forEach((draw) => draw());
  const root = document.documentElement, light = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => root.dataset.theme ? root.dataset.theme === "dark" : light.matches;
  const toggle = document.getElementById("theme");
  const name = () => { toggle.textContent = isDark() ? "Light" : "Dark"; toggle.setAttribute("aria-label", "Switch to " + toggle.textContent.toLowerCase() + " colours"); };
  toggle.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; name(); redraw(); });
  light.addEventListener("change", () => { name(); redraw(); });
  name();
  let waiting = 0;
  addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(() => charts.forEach((chart) => chart.resize())); });
  let before = null;
  addEventListener("beforeprint", () => {
    before = [root.dataset.theme, [...document.querySelectorAll("details:not([open])")]];
    root.dataset.theme = "light";
    before[1].forEach((one) => { one.open = true; });
    charts.forEach((chart) => chart.resize({ width: Math.min(chart.getWidth(), 660) }));
    redraw(); // after the resize: this draws at once, a resize in the next frame only
  });
  addEventListener("afterprint", () => {
    if (!before) return;
    if (before[0]) root.dataset.theme = before[0]; else delete root.dataset.theme;
    before[1].forEach((one) => { one.open = false; });
    before = null;
    charts.forEach((chart) => chart.resize({ width: "auto" }));
    redraw();
  });
  root.dataset.ready = "yes";
})();
