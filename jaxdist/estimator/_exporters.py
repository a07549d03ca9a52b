"""Exporters: decide which evaluations are followed by an export."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxdist._buckets import as_place
from jaxdist._called import called, refuse, refuse_type
from jaxdist._checkpoints import read_dict, replace_file
from jaxdist._validate import as_integer, check_callable, check_instance, check_text, show
from jaxdist.estimator._export import delete_old

_BEST = "best.json"


class Exporter:
    """Base class of exporters. Override `export`.

    Args:
        name: The name of the folder: `MODEL_DIR/export/NAME`.

    Source:
        `tf.estimator.Exporter`.
    """

    @called(lambda self: f"estimator.{type(self).__name__}")
    def __init__(self, name: str) -> None:
        check_text("name", name, "best")
        self.name = name

    def export(
        self,
        estimator: Any,
        export_path: str,
        checkpoint_path: str,
        eval_result: Mapping[str, Any],
        is_the_final_export: bool,
    ) -> str | None:
        """Export, or do nothing.

        Args:
            estimator: The estimator.
            export_path: The folder of this exporter.
            checkpoint_path: The checkpoint that was evaluated.
            eval_result: The results that `evaluate` returned.
            is_the_final_export: Whether training has ended.

        Returns:
            The path of the export; None if nothing was exported.
        """
        raise NotImplementedError


class FinalExporter(Exporter):
    """Exports once, when training has ended.

    Args:
        name: The name of the folder.
        serving_input_receiver_fn: A function without arguments, which returns example features;
            see `Estimator.export`.

    Raises:
        ArgumentTypeError: An argument is of the wrong type.

    Example:
        >>> jaxdist.estimator.FinalExporter("final", lambda: np.zeros((1, 4), "float32")).name
        'final'

    Source:
        `tf.estimator.FinalExporter`.
    """

    @called(lambda self: f"estimator.{type(self).__name__}")
    def __init__(self, name: str, serving_input_receiver_fn: Callable[[], Any]) -> None:
        super().__init__(name)
        self._make_features = _check_receiver(serving_input_receiver_fn)

    def export(
        self,
        estimator: Any,
        export_path: str,
        checkpoint_path: str,
        eval_result: Mapping[str, Any],
        is_the_final_export: bool,
    ) -> str | None:
        """Export if training has ended; see `Exporter.export`.

        Args:
            estimator: The estimator.
            export_path: The folder of this exporter.
            checkpoint_path: The checkpoint that was evaluated.
            eval_result: The results that `evaluate` returned.
            is_the_final_export: Whether training has ended.
        """
        if not is_the_final_export:
            return None
        features = self._make_features()
        exported: str = estimator.export(export_path, features, checkpoint_path=checkpoint_path)
        return exported


class LatestExporter(Exporter):
    """Exports after each evaluation, and keeps the newest exports.

    Args:
        name: The name of the folder.
        serving_input_receiver_fn: A function without arguments, which returns example features;
            see `Estimator.export`.
        exports_to_keep: How many exports to keep; None for all.

    Raises:
        ArgumentError: `exports_to_keep` is less than 1.
        ArgumentTypeError: An argument is of the wrong type.

    Source:
        `tf.estimator.LatestExporter`.
    """

    @called(lambda self: f"estimator.{type(self).__name__}")
    def __init__(
        self,
        name: str,
        serving_input_receiver_fn: Callable[[], Any],
        *,
        exports_to_keep: int | None = 5,
    ) -> None:
        super().__init__(name)
        self._make_features = _check_receiver(serving_input_receiver_fn)
        self._keep = _check_keep(exports_to_keep)

    def export(
        self,
        estimator: Any,
        export_path: str,
        checkpoint_path: str,
        eval_result: Mapping[str, Any],
        is_the_final_export: bool,
    ) -> str | None:
        """Export, and delete old exports; see `Exporter.export`.

        Args:
            estimator: The estimator.
            export_path: The folder of this exporter.
            checkpoint_path: The checkpoint that was evaluated.
            eval_result: The results that `evaluate` returned.
            is_the_final_export: Whether training has ended.
        """
        features = self._make_features()
        found: str = estimator.export(export_path, features, checkpoint_path=checkpoint_path)
        delete_old(as_place("export_path", export_path, "runs/a/export/best"), self._keep)
        return found


class BestExporter(Exporter):
    """Exports whenever an evaluation is better than all before it, including earlier runs.

    Args:
        name: The name of the folder.
        serving_input_receiver_fn: A function without arguments, which returns example features;
            see `Estimator.export`.
        compare_fn: `(best_eval_result, current_eval_result) -> bool`: whether the second is better.
            Both are dicts, passed by these names. None compares the loss: smaller is better.
        exports_to_keep: How many exports to keep; None for all.

    Raises:
        ArgumentError: `exports_to_keep` is less than 1.
        ArgumentTypeError: An argument is of the wrong type.

    Source:
        `tf.estimator.BestExporter`.
    """

    @called(lambda self: f"estimator.{type(self).__name__}")
    def __init__(
        self,
        name: str = "best_exporter",
        serving_input_receiver_fn: Callable[[], Any] | None = None,
        *,
        compare_fn: Callable[..., bool] | None = None,
        exports_to_keep: int | None = 5,
    ) -> None:
        super().__init__(name)
        self._make_features = _check_receiver(serving_input_receiver_fn)
        if compare_fn is not None:
            remedy = "Pass lambda best_eval_result, current_eval_result: ..."
            check_callable(compare_fn, "compare_fn", remedy)
        self._is_better = compare_fn or _has_smaller_loss
        self._keep = _check_keep(exports_to_keep)

    def export(
        self,
        estimator: Any,
        export_path: str,
        checkpoint_path: str,
        eval_result: Mapping[str, Any],
        is_the_final_export: bool,
    ) -> str | None:
        """Export if the evaluation is the best one; see `Exporter.export`.

        Args:
            estimator: The estimator.
            export_path: The folder of this exporter.
            checkpoint_path: The checkpoint that was evaluated.
            eval_result: The results that `evaluate` returned.
            is_the_final_export: Whether training has ended.
        """
        folder = as_place("export_path", export_path, "runs/a/export/best")
        best = read_dict(folder / _BEST)
        if best is not None and not self._is_better(
            best_eval_result=best, current_eval_result=eval_result
        ):
            return None
        features = self._make_features()
        found: str = estimator.export(export_path, features, checkpoint_path=checkpoint_path)
        # After the export: a process that is killed between the two repeats the export.
        plain = {name: float(value) for name, value in eval_result.items()}
        replace_file(folder / _BEST, json.dumps(plain).encode())
        delete_old(folder, self._keep)
        return found


def _has_smaller_loss(
    best_eval_result: Mapping[str, Any], current_eval_result: Mapping[str, Any]
) -> bool:
    return bool(current_eval_result["loss"] < best_eval_result["loss"])


def _check_receiver(function: Any) -> Callable[[], Any]:
    remedy = "Pass a function that returns example features: lambda: np.zeros((1, 4), 'float32')."
    check_callable(function, "serving_input_receiver_fn", remedy)
    checked: Callable[[], Any] = function
    return checked


def _check_keep(keep: Any) -> int | None:
    return None if keep is None else as_integer("exports_to_keep", keep, least=1)


def check_exporters(exporters: Any) -> tuple[Exporter, ...]:
    """Return exporters as a tuple.

    Raises:
        ArgumentTypeError: A value is not an exporter.
        ArgumentError: Two have the same name.
    """
    if exporters is None:
        return ()
    listed: Sequence[Any] = [exporters] if isinstance(exporters, Exporter) else exporters
    if not isinstance(listed, (list, tuple)):
        raise refuse_type(
            f"exporters={show(exporters)}.",
            "exporters is an exporter, or a list of exporters.",
            "Pass for instance [jaxdist.estimator.FinalExporter('final', make_features)].",
        )
    remedy = "Pass for instance [jaxdist.estimator.FinalExporter('final', make_features)]."
    names: set[str] = set()
    for exporter in listed:
        check_instance("exporters", exporter, Exporter, "a list of exporters", remedy)
        if exporter.name in names:
            raise refuse(
                f"two exporters with the name {exporter.name!r}.",
                "An exporter writes into the folder that has its name.",
                "Give each of them another name.",
            )
        names.add(exporter.name)
    return tuple(listed)
