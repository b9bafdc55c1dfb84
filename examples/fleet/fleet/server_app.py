"""The server: a strategy of Pliant's, a model to begin with, and a test after every round."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from fleet import data, model
from fleet.settings import setting_of
from pliant.integrations.flower import Elastic, RoundReport

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    setting = setting_of(context.run_config)
    torch.set_num_threads(1)
    held = data.load(setting.task, setting.data)
    net = model.net(held, setting.seed)
    seen = {"clock": 0.0}

    def show(report: RoundReport) -> None:
        seen["clock"] += report.seconds
        seen.update(loss=report.loss, took=report.took, refused=len(report.refused), late=report.late)

    def judge(number: int, arrays: ArrayRecord) -> MetricRecord:
        net.load_state_dict(arrays.to_torch_state_dict())
        accuracy = data.accuracy(net, held)
        who = f" | {seen['took']} clients, {seen['refused']} refused, {seen['late']} late" if "took" in seen else ""
        print(f"round {number:3} | clock {seen['clock']:7.2f} s | accuracy {accuracy:.3f}{who}", flush=True)
        return MetricRecord({"accuracy": accuracy, "clock": seen["clock"]})

    strategy = Elastic(
        setting.method, rate=setting.rate, share=setting.share, seed=setting.seed, path=setting.state or None, on_round=show
    )
    strategy.start(grid, ArrayRecord(net.state_dict()), setting.rounds, evaluate_fn=judge)
