"""SG401: the derivative is infinite where the function is fine."""

from __future__ import annotations

from stepguard.diagnose.arithmetic import overflow, zero_divisor
from stepguard.diagnose.case import Case, has_zero
from stepguard.diagnose.rule import HINT, PLAUSIBLE, Proof, Rule, code, prose
from stepguard.diagnose.rules.sg202 import LOG_NODES
from stepguard.diagnose.wording import at_index, describe
from stepguard.records import Operand, Remedy

SINGULAR = {
    "Sqrt": "sqrt(x) at x = 0 has slope 1 / (2 sqrt(x)), which is infinite",
    "Rsqrt": "1 / sqrt(x) near x = 0 has slope -x**-1.5 / 2",
    "Pow": "x**g at x = 0 with g < 1 has slope g * x**(g - 1), which is infinite",
    "Acos": "acos(x) at x = 1 or -1 has slope -1 / sqrt(1 - x*x), which is infinite",
    "Asin": "asin(x) at x = 1 or -1 has slope 1 / sqrt(1 - x*x), which is infinite",
    "Acosh": "acosh(x) at x = 1 has slope 1 / sqrt(x*x - 1), which is infinite",
    "Atanh": "atanh(x) at x = 1 or -1 has slope 1 / (1 - x*x), which is infinite",
    "Atan2": "atan2(0, 0) has no slope: it divides by x*x + y*y = 0",
    "Angle": "the angle of 0 has no slope: it divides by |z| = 0",
    "Hypot": "hypot(0, 0) has no slope: it divides by the result 0",
    "Erfinv": "erfinv(x) at x = 1 or -1 has an infinite slope",
    "Reciprocal": "1 / x near x = 0 has slope -1 / x**2, which overflows long before 1 / x does",
    "Div": "a / b has slope -a / b**2 in b, which overflows long before a / b does",
    "Cumprod": "cumprod divides by its input, which is 0",
    "Prod": "prod divides by its input, which is 0",
    "WeightNormInterface": "weight norm divides by the norm of a row, which is 0",
    "Xlogy": "x log y at x = y = 0 is 0, but its slope in y is x / y = 0 / 0",
    "SpecialXlog1Py": "x log(1 + y) at x = 0, y = -1 is 0, but its slope in y is 0 / 0",
    "SpecialEntr": "-p log p at p = 0 is 0, but its slope is -log(p) - 1, which is infinite",
    "CosineSimilarity": "the cosine similarity of a zero vector has no slope",
}
SINGULAR |= dict.fromkeys(
    [
        "Norm",
        "LinalgVectorNorm",
        "LinalgNorm",
        "LinalgMatrixNorm",
        "Dist",
        "Cdist",
        "Pdist",
        "EuclideanDist",
        "Renorm",
    ],
    "the norm of a zero vector has no slope: it divides by the norm",
)
SINGULAR |= dict.fromkeys(
    ["LinalgEigh", "LinalgEig", "LinalgSvd", "Svd", "SymEig", "LinalgEigvalsh"],
    "eigenvectors of equal eigenvalues have no slope: it divides by their difference, which is 0",
)
SINGULAR |= dict.fromkeys(
    [
        "LinalgQr",
        "LinalgInvEx",
        "LinalgSolveEx",
        "LinalgCholeskyEx",
        "LinalgDet",
        "LinalgSlogdet",
        "Cholesky",
        "LinalgPinv",
    ],
    "the slope divides by a diagonal or pivot that is 0: the matrix is singular",
)
SINGULAR |= dict.fromkeys(
    ("Std", "StdMean"),
    "the slope of a standard deviation of 0 is infinite: it divides by the deviation",
)
SINGULAR |= dict.fromkeys(
    LOG_NODES | {"Lgamma"}, "the slope of a logarithm is 1 / x, which is infinite at 0"
)


def _evidence(case: Case) -> Proof | None:
    if case.phase != "backward" or case.unselected:
        return None
    if case.node not in SINGULAR:
        return _divides(case) or _explodes(case)
    zero = _singular_operand(case)
    if zero is None and case.short and case.wider:
        return None
    reason = SINGULAR[case.node]
    numbers = (
        f"{case.place} met it{at_index(zero)}: {describe(zero)}"
        if zero is not None
        else f"born in {case.place}"
    )
    confidence = 0.93 if zero is not None else 0.7
    if not case.finite_inputs:
        confidence = PLAUSIBLE
    if case.node in LOG_NODES:
        confidence = min(confidence, 0.6)
    forward = "the forward value is finite, only its slope is not" if case.loss_finite else ""
    return Proof(confidence=confidence, evidence=(reason, numbers, forward, case.confirmed_samples))


def _singular_operand(case: Case) -> Operand | None:
    """The zero the gradient is divided by, rather than a gradient that happens to be zero."""
    return zero_divisor(case) or next(
        (o for o in reversed(case.inputs) if o.dtype and has_zero(o)), None
    )


def _divides(case: Case) -> Proof | None:
    """A gradient that is divided by 0 in a node without a rule of its own, such as a custom
    autograd Function.
    """
    zero = zero_divisor(case)
    if zero is None or not case.finite_inputs:
        return None
    text = f"{case.place} divides the gradient by 0{at_index(zero)}: {describe(zero)}"
    return Proof(confidence=0.88, evidence=(text, case.confirmed_samples))


def _explodes(case: Case) -> Proof | None:
    if not overflow(case) or case.narrow:
        return None
    text = (
        f"{case.place}: the gradient grew beyond {case.dtype} on its way back; operands reach "
        f"{case.magnitude:.3g}"
    )
    return Proof(confidence=HINT, evidence=(text, case.confirmed_samples))


RULE = Rule(
    code="SG401",
    title="singular gradient (sqrt at 0, acos at 1, eigh of equal eigenvalues)",
    what=prose(
        """
        The function is finite at this point but its derivative is not. The loss looks healthy, the gradient
        is Inf or NaN.
        """
    ),
    why=prose(
        """
        A magnitude or distance is exactly 0 (silence, identical points, a zero parameter), a cosine is
        exactly 1, a probability in a focal loss with gamma < 1 saturates, a symmetric matrix has equal
        eigenvalues. The usual cure, an epsilon after the root, changes nothing: it must go inside.
        """
    ),
    how=prose(
        """
        The forward pass is finite; in backward, the node of a function with a known singular point makes the
        first Inf or NaN, and the operand it divides by is 0. detect_anomaly looks for NaN only and blames a
        later node.
        """
    ),
    evidence=_evidence,
    remedies=(
        Remedy(
            title="Double where: give the root a harmless argument where it is 0, and choose 0 "
            "afterwards",
            snippet=code(
                """
                power = spectrum.pow(2).sum(-1)
                silent = power == 0
                magnitude = torch.where(silent, 0.0, torch.where(silent, 1.0, power).sqrt())
                loss = (magnitude - reference).abs().mean()
                """
            ),
        ),
        Remedy(
            title="Use the built-in with a defined subgradient: torch.linalg.vector_norm, or abs "
            "of a complex tensor",
            snippet=code(
                """
                magnitude = torch.linalg.vector_norm(spectrum, dim=-1)
                loss = (magnitude - reference).abs().mean()
                """
            ),
            safety="changes-numbers",
        ),
        Remedy(
            title="Put an epsilon inside the root (not after it)",
            snippet=code(
                """
                magnitude = (spectrum.pow(2).sum(-1) + 1e-8).sqrt()
                loss = (magnitude - reference).abs().mean()
                """
            ),
            safety="changes-numbers",
        ),
    ),
    setup=code(
        """
        import torch

        spectrum = torch.tensor([[3.0, 4.0], [0.0, 0.0]], requires_grad=True)  # the second bin is silent
        reference = torch.ones(2)
        """
    ),
    bad=code(
        """
        magnitude = spectrum.pow(2).sum(-1).sqrt()
        loss = (magnitude - reference).abs().mean()
        """
    ),
    see=(
        "pytorch/audio#993",
        "kornia/kornia#918",
        "speechbrain/speechbrain#181",
        "pytorch/pytorch#46849",
    ),
)
