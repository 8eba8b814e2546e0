"""What stepguard costs, beside what people use today: `python -m benchmarks overhead`, `.counts`,
`.table`.
"""
