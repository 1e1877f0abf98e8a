// What kvtrace's HTML page needs of Apache ECharts; scripts/charts.py makes kvtrace/render/html/charts.min.js of it.
import * as core from "echarts/core";
import { CustomChart } from "echarts/charts";
import { AriaComponent, DataZoomComponent, GridComponent, TooltipComponent } from "echarts/components";
import { CanvasRenderer, SVGRenderer } from "echarts/renderers";

core.use([CustomChart, AriaComponent, DataZoomComponent, GridComponent, TooltipComponent, CanvasRenderer, SVGRenderer]);

export const init = core.init;
export const version = core.version;
