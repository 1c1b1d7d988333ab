"""The sum of row sums, on the CPU through Triton's interpreter."""

from tests.support import interpreter

if not interpreter.active():

    def test_under_the_interpreter():
        interpreter.run_file_interpreted(__file__)

else:
    import torch

    from expertile.ops.gathered_mm.pointwise import add_row_sums

    interpreter.repair()

    def test_sums_go_to_their_slots():
        sums, slots = torch.randn(3, 600), torch.randperm(700)[:600].int()
        sums[:, 550:] = float("nan")
        dweights = torch.zeros(100, 7)
        add_row_sums(sums, slots, torch.tensor([100, 550], dtype=torch.int32), dweights)
        wanted = torch.zeros(700)
        wanted[slots[:550].long()] = sums[:, :550].sum(0)
        torch.testing.assert_close(dweights.view(-1), wanted)
