// Draws the charts of a page with uPlot, from the JSON in #chart-data.
(() => {
  const { axes, columns, charts } = JSON.parse(document.getElementById('chart-data').textContent);
  const style = getComputedStyle(document.documentElement);
  const colour = name => style.getPropertyValue(name).trim();
  const drawn = new Map();   // key of a chart -> uPlot
  const hidden = new Map();  // key of a chart -> labels of the series that are switched off
  const choice = { axis: Object.keys(axes)[0], smoothing: 0, logarithmic: false };

  function number(value, digits = 5) {
    const size = Math.abs(value);
    const form = { notation: 'compact', maximumSignificantDigits: digits - 1 };
    if (size >= 1e4) return new Intl.NumberFormat('en', form).format(value);
    if (size !== 0 && size < 1e-3) return value.toExponential(digits - 3);
    return String(Number(value.toPrecision(digits)));
  }
  const percent = (value, digits = 5) =>
    String(Number((100 * value).toPrecision(digits - 1))) + '\u2009%';

  // Labels of an axis, with as many digits as tell its ticks apart.
  function labels(ticks, shown) {
    const known = ticks.filter(tick => tick !== null);
    let digits = 5;
    while (digits < 15 && new Set(known.map(tick => shown(tick, digits))).size < known.length) digits++;
    return ticks.map(tick => (tick === null ? '' : shown(tick, digits)));
  }

  const ink = series => colour('--c' + (series.colour % 8)) + (series.faint ? '99' : '');

  // An exponential moving average without the bias towards its first value.
  function smoothed(values, factor) {
    let mean = 0, weight = 0;
    return values.map(value => {
      if (value === null) return null;
      mean = factor * mean + (1 - factor) * value;
      weight = factor * weight + 1 - factor;
      return mean / weight;
    });
  }

  function column(series) {
    const found = columns[series.x];
    return found[choice.axis] || Object.values(found)[0];
  }

  function values(chart, series) {
    let made = series.y;
    if (series.smooth && choice.smoothing) made = smoothed(made, choice.smoothing);
    if (chart.logarithmic && choice.logarithmic) made = made.map(y => (y > 0 ? y : null));
    return made;
  }

  // The value of a series nearest to the pointer: runs are measured at different places.
  function nearest(plot, number, index) {
    const found = plot.data[number];
    for (let far = 0; far < found.length; far++) {
      if (found[index - far] != null) return index - far;
      if (found[index + far] != null) return index + far;
    }
    return null;
  }

  function showLast(plot) {
    const last = plot.data[0].length - 1;
    plot.setLegend({ idxs: plot.data.map((_, number) => number ? nearest(plot, number, last) : last) });
  }

  // Uneven values get a round upper end; if all are 0, the axis still has one.
  const fromZero = (plot, low, high) => [Math.min(0, low || 0), high > 0 ? high * 1.08 : 1];

  function options(chart, width) {
    const bars = chart.labels.length > 0;
    const shown = chart.percent ? percent : number;
    const log = chart.logarithmic && choice.logarithmic;
    const room = 16 + 7 * Math.max(0, ...chart.labels.map(label => label.length));
    const off = hidden.get(chart.key) || new Set();
    const axis = {
      stroke: colour('--soft'),
      font: '12px system-ui, sans-serif',
      grid: { stroke: colour('--line'), width: 1 },
      ticks: { stroke: colour('--line'), width: 1, size: 4 },
    };
    const widest = (plot, texts) => 14 + 7 * Math.max(...(texts || ['']).map(each => (each || '').length));
    return {
      width,
      height: Math.max(200, Math.min(280, Math.round(width * 0.55))),
      padding: bars ? [null, room / 2, null, null] : undefined,
      legend: { markers: { width: 0, fill: (plot, number) => ink(chart.series[number - 1]) } },
      cursor: {
        sync: bars ? undefined : { key: choice.axis },
        dataIdx: (plot, number, index) => (number ? nearest(plot, number, index) : index),
        points: { size: 7 },
        y: false,
      },
      scales: {
        x: bars ? { time: false, range: [-0.6, chart.labels.length - 0.4] } : { time: false },
        y: log ? { distr: 3 } : bars || chart.percent ? { range: fromZero } : {},
      },
      axes: [
        {
          ...axis,
          size: 32,
          values: (plot, ticks) => (bars ? ticks.map(tick => chart.labels[tick] ?? '') : labels(ticks, number)),
          ...(bars ? { incrs: [1, 2, 4, 8, 16, 32], space: room, grid: { show: false } } : {}),
        },
        {
          ...axis,
          size: widest,
          values: (plot, ticks) => labels(ticks, shown),
        },
      ],
      series: [
        {
          label: bars ? 'range' : axes[choice.axis],
          value: (plot, x) => (x == null ? '\u2013' : bars ? chart.labels[x] : number(x)),
        },
        ...chart.series.map(series => {
          return {
            label: series.label,
            show: !off.has(series.label),
            stroke: ink(series),
            fill: bars ? ink(series) : undefined,
            width: series.faint ? 1.25 : 2,
            points: { show: series.dots || series.y.length < 3, size: 6, fill: ink(series) },
            paths: bars ? uPlot.paths.bars({ size: [0.85, 64] }) : undefined,
            value: (plot, y) => (y == null ? '\u2013' : shown(y)),
          };
        }),
      ],
      hooks: {
        ready: [showLast],
        setCursor: [plot => { if (plot.cursor.left < 0) showLast(plot); }],
        setSeries: [(plot, number, change) => {
          if (number === null || change.show === undefined) return;
          const label = plot.series[number].label;
          change.show ? off.delete(label) : off.add(label);
          hidden.set(chart.key, off);
        }],
      },
    };
  }

  function draw(chart) {
    const place = document.querySelector('#chart-' + chart.key + ' .plot');
    if (!place || !place.clientWidth) return;
    drawn.get(chart.key)?.destroy();
    const tables = chart.series.map(series => [column(series), values(chart, series)]);
    const table = uPlot.join(tables);
    drawn.set(chart.key, new uPlot(options(chart, place.clientWidth), table, place));
  }

  const drawAll = () => charts.forEach(draw);

  document.querySelector('.controls')?.addEventListener('input', event => {
    const { name, id, value, checked } = event.target;
    if (name === 'axis') choice.axis = value;
    if (id === 'smoothing') choice.smoothing = Number(value);
    if (id === 'logarithmic') choice.logarithmic = checked;
    drawAll();
  });
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', drawAll);
  let width = 0;
  new ResizeObserver(() => {
    if (document.body.clientWidth !== width) {
      width = document.body.clientWidth;
      drawAll();
    }
  }).observe(document.body);
})();
