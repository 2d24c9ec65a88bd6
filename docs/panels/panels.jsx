// Draws one dashboard from panels.json (docs/pictures.py writes it) with the panel libraries of Perses.
import React from 'react';
import { createRoot } from 'react-dom/client';
import { ThemeProvider, CssBaseline, Box, Typography } from '@mui/material';
import { ChartsProvider, SnackbarProvider, Table, generateChartsTheme, getTheme } from '@perses-dev/components';
import { TimeSeriesChartBase } from '@perses-dev/timeseries-chart-plugin';

const theme = getTheme(new URLSearchParams(location.search).get('theme') ?? 'light');
const charts = generateChartsTheme(theme, {});
const COLUMN = 1176 / 24, ROW = 38;
const PALETTE = ['#2563a8', '#b45309', '#15803d', '#7c3aed', '#be185d', '#0e7490', '#854d0e', '#475569'];
const FORMATS = { percentunit: 'percent-decimal', s: 'seconds', bytes: 'bytes', short: 'decimal' };
const format = (unit) => ({ unit: FORMATS[unit] ?? 'decimal', decimalPlaces: 1, shortValues: true });

function Lines({ panel, width, height }) {
  const scale = { startMs: panel.start, endMs: panel.end, stepMs: panel.step, rangeMs: panel.end - panel.start };
  const mapping = panel.series.map((series, at) => ({
    type: 'line', id: series.name, datasetIndex: at, name: series.name, showSymbol: false,
    color: PALETTE[at % PALETTE.length], lineStyle: { width: 1.5 }, itemStyle: { color: PALETTE[at % PALETTE.length] },
  }));
  if (panel.threshold != null) {
    mapping.push({ type: 'line', id: 'threshold', datasetIndex: panel.series.length, name: 'threshold', showSymbol: false,
      color: '#d32f2f', lineStyle: { width: 1, type: 'dashed' }, itemStyle: { color: '#d32f2f' } });
  }
  const data = [...panel.series, ...(panel.threshold == null ? [] : [{ name: 'threshold',
    values: [[panel.start, panel.threshold], [panel.end, panel.threshold]] }])];
  return (
    <Box sx={{ width, height }}>
      <TimeSeriesChartBase height={height - 18} data={data} seriesMapping={mapping} timeScale={scale}
        format={format(panel.unit)} noDataVariant="message" yAxis={{ type: 'value', min: 0 }} />
      <Typography noWrap sx={{ fontSize: 11 }}>{panel.series.map((series) => series.name).join('   ')}</Typography>
    </Box>
  );
}

const Stat = ({ panel }) => (
  <Typography sx={{ fontSize: 34, fontWeight: 700, textAlign: 'center', color: panel.color }}>{panel.value}</Typography>
);

const Rows = ({ panel }) => (
  <Table height={panel.rows.length * 36 + 48} width="100%" density="compact" defaultColumnWidth="auto"
    data={panel.rows} cellConfigs={panel.cells} getRowId={(row, at) => String(at)}
    columns={panel.columns.map((name) => ({ accessorKey: name, header: name }))} />
);

const States = ({ panel }) => panel.series.map((series) => (
  <Box key={series.name} sx={{ display: 'flex', alignItems: 'center', mb: 0.5 }}>
    <Typography noWrap sx={{ width: 320, fontSize: 12 }}>{series.name}</Typography>
    <Box sx={{ display: 'flex', flex: 1, height: 16, bgcolor: 'action.hover' }}>
      {series.colors.map((color, at) => <Box key={at} sx={{ flex: 1, background: color ?? 'transparent' }} />)}
    </Box>
  </Box>
));

const Note = ({ panel }) => <Box sx={{ fontSize: 13, overflow: 'hidden' }} dangerouslySetInnerHTML={{ __html: panel.html }} />;
const KINDS = { timeseries: Lines, heatmap: Lines, stat: Stat, table: Rows, 'state-timeline': States, text: Note };

function Panel({ panel }) {
  const [width, height] = [panel.w * COLUMN - 8, panel.h * ROW - 8];
  const place = { position: 'absolute', left: panel.x * COLUMN, top: panel.y * ROW, width, height };
  if (panel.type === 'row') return <Typography sx={{ ...place, fontWeight: 700, pt: 1 }}>{panel.title}</Typography>;
  const Kind = KINDS[panel.type];
  return (
    <Box sx={{ ...place, border: 1, borderColor: 'divider', p: 1, overflow: 'hidden', boxSizing: 'border-box' }}>
      <Typography noWrap sx={{ fontSize: 13, fontWeight: 600 }}>{panel.title}</Typography>
      {Kind && <Kind panel={panel} width={width - 18} height={height - 40} />}
    </Box>
  );
}

const page = await (await fetch('panels.json')).json();
const bottom = Math.max(...page.panels.map((panel) => panel.y + panel.h)) * ROW;
createRoot(document.getElementById('root')).render(
  <ThemeProvider theme={theme}>
    <ChartsProvider chartsTheme={charts}>
      <SnackbarProvider>
        <CssBaseline />
        <Typography sx={{ p: 1.5, fontSize: 20, fontWeight: 600 }}>{page.title}</Typography>
        <Box sx={{ position: 'relative', height: bottom, m: 1.5, mt: 0 }}>
          {page.panels.map((panel) => <Panel key={panel.id} panel={panel} />)}
        </Box>
      </SnackbarProvider>
    </ChartsProvider>
  </ThemeProvider>,
);
