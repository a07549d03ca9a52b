"""Exports: writes a model as one program and its weights, and decides when."""

from jaxdist.estimator._exporting.export import Exported as Exported
from jaxdist.estimator._exporting.export import check_features as check_features
from jaxdist.estimator._exporting.export import load_export as load_export
from jaxdist.estimator._exporting.export import write_export as write_export
from jaxdist.estimator._exporting.exporters import BestExporter as BestExporter
from jaxdist.estimator._exporting.exporters import Exporter as Exporter
from jaxdist.estimator._exporting.exporters import FinalExporter as FinalExporter
from jaxdist.estimator._exporting.exporters import LatestExporter as LatestExporter
from jaxdist.estimator._exporting.exporters import check_exporters as check_exporters
